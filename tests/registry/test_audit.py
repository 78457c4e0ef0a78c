"""A plugin that breaks the contract is named, with the hook and the signature that was expected."""

import pytest

from outrider.device import BackendLoadError, PluginContractError
from outrider.registry import Registry

IMPORTS = """
from outrider.device.plugin import BackendInfo, hookimpl, hookspec
"""
INFO = """
@hookimpl
def backend_info():
    return BackendInfo(name="bad", description="")
"""
CREATE = """
@hookimpl
def create_backend(ordinal, options):
    return None
"""
BREACHES = {
    "missing create": (IMPORTS + INFO, "'create_backend' is missing; expected @hookimpl def create_backend(ordinal: int, "),
    "missing info": (IMPORTS + CREATE, "'backend_info' is missing; expected @hookimpl def backend_info()"),
    "empty module": ("", "'backend_info' is missing"),
    "undecorated": (IMPORTS + INFO + CREATE.replace("@hookimpl", ""), "isn't marked with @hookimpl"),
    "dropped argument": (
        IMPORTS + INFO + CREATE.replace("ordinal, options", "ordinal"),
        "(ordinal), expected create_backend(",
    ),
    "renamed argument": (IMPORTS + INFO + CREATE.replace("ordinal,", "index,"), "(index, options), expected create_backend("),
    "extra argument": (IMPORTS + INFO + CREATE.replace("options)", "options, more)"), "more), expected create_backend("),
    # pluggy would accept this one and never pass the options.
    "default": (IMPORTS + INFO + CREATE.replace("options)", "options=None)"), "without defaults"),
    "star": (IMPORTS + INFO + CREATE.replace("ordinal, options", "*args"), "(*args), expected create_backend("),
    "typo": (
        IMPORTS + INFO + CREATE + "@hookimpl\ndef create_backnd(ordinal, options): pass\n",
        "'create_backnd' is marked as a hook but there is none of that name; did you mean 'create_backend'?",
    ),
    "wrapper": (
        IMPORTS + INFO + CREATE.replace("@hookimpl", "@hookimpl(wrapper=True)").replace("return None", "yield"),
        "wrapper",
    ),
    "info of another type": (IMPORTS + INFO.replace('BackendInfo(name="bad", description="")', "{}") + CREATE, "a dict"),
    "info is None": (IMPORTS + INFO.replace('BackendInfo(name="bad", description="")', "None") + CREATE, "returned None"),
    "another name": (IMPORTS + INFO.replace('name="bad"', 'name="good"') + CREATE, "name='good', expected 'bad'"),
    "too old": (
        IMPORTS + INFO.replace('description=""', 'description="", interface_min=0, interface_max=0') + CREATE,
        "interface versions 0 to 0, this outrider has version 1; install a newer plugin",
    ),
    "too new": (
        IMPORTS + INFO.replace('description=""', 'description="", interface_min=2, interface_max=3') + CREATE,
        "interface versions 2 to 3, this outrider has version 1; install a newer outrider",
    ),
}


@pytest.mark.parametrize("breach", BREACHES)
def test_breach_is_named(install, breach):
    source, expected = BREACHES[breach]
    install("bad", source)
    with pytest.raises(PluginContractError, match="'bad' of outrider-bad 1.0") as caught:
        Registry().create("bad")
    assert expected in str(caught.value)


def test_a_class_is_no_plugin(install):
    site = install("bad", IMPORTS + "class Plugin:\n    pass\n")
    entry = next(site.glob("*.dist-info")) / "entry_points.txt"
    entry.write_text(entry.read_text().replace("_plugin\n", "_plugin:Plugin\n"))
    with pytest.raises(PluginContractError, match="is a class"):
        Registry().create("bad")


def test_an_object_can_be_a_plugin(install):
    site = install(
        "bad",
        IMPORTS
        + "class Plugin:\n"
        + "".join(
            f"    {line}\n"
            for line in (INFO + CREATE)
            .replace("backend_info()", "backend_info(self)")
            .replace("(ord", "(self, ord")
            .split("\n")
        )
        + "plugin = Plugin()\n",
    )
    entry = next(site.glob("*.dist-info")) / "entry_points.txt"
    entry.write_text(entry.read_text().replace("_plugin\n", "_plugin:plugin\n"))
    assert Registry().backends.info("bad").name == "bad"


def test_create_returning_nothing(install):
    install("bad", IMPORTS + INFO + CREATE)
    with pytest.raises(PluginContractError, match="create_backend returned None, expected a Backend"):
        Registry().create("bad")


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import no_such_vendor_package", "ModuleNotFoundError: No module named 'no_such_vendor_package'"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("def f(:\n", "SyntaxError"),
        (
            "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise ImportError('outer') from e\n",
            "caused by ZeroDivision",
        ),
    ],
)
def test_module_that_fails_to_load(install, source, reason):
    install("bad", source)
    with pytest.raises(BackendLoadError, match="'bad' of outrider-bad 1.0 .* can't be loaded") as caught:
        Registry().create("bad")
    assert reason in str(caught.value)


def test_info_that_raises(install):
    install("bad", IMPORTS + INFO.replace("return", "raise RuntimeError('no driver')\n    return") + CREATE)
    with pytest.raises(BackendLoadError, match="backend_info failed: RuntimeError: no driver"):
        Registry().create("bad")


def test_one_module_under_two_names(install):
    site = install("bad", IMPORTS + INFO + CREATE)
    entry = next(site.glob("*.dist-info")) / "entry_points.txt"
    entry.write_text(entry.read_text() + "worse = outrider_bad_plugin\n")
    registry = Registry()
    assert registry.backends.info("bad").name == "bad"
    with pytest.raises(PluginContractError, match="'worse' .* can't be registered"):
        registry.backends.info("worse")
