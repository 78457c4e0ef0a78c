"""The README's Python runs as it stands, on the bundled model."""

import re
from pathlib import Path

from outrider.bundled import bundled

ROOT = Path(__file__).resolve().parents[2]


def test_readme_python(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    for placeholder, part in (("path/to/model", "target"), ("path/to/eagle-head", "eagle")):
        assert placeholder in code
        code = code.replace(placeholder, str(bundled(part)))
    exec(compile(code, "README.md", "exec"), {})
    assert len(capsys.readouterr().out) > 100


def test_readme_names_exactly_the_make_targets_that_set_up():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for target in set(re.findall(r"^make ([a-z-]+)", readme, re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
