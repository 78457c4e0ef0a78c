"""``outrider support``: print the support table of all backends from recorded evidence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from rich.console import Console

from outrider.cli.options.option_values import DIRECTORY, INPUT_FILE, JsonOption, option, output_file, text
from outrider.cli.terminal.files import read_utf8, write_whole
from outrider.cli.terminal.report import CommandReport
from outrider.device.errors import ConfigError

EVIDENCE = Path("docs/evidence/support")
COMMAND = "outrider support --write docs/reference/generated/support.md"


def support(
    evidence: Annotated[Path, option("--evidence", value=DIRECTORY, help="Directory of the records.")] = EVIDENCE,
    write: Annotated[Path | None, option("--write", value=output_file(), help="Write the page to this file.")] = None,
    check: Annotated[
        Path | None,
        option("--check", value=INPUT_FILE, help="Fail unless this file equals the page made from the records."),
    ] = None,
    add: Annotated[
        Path | None,
        option("--add", value=INPUT_FILE, help="Add a record made from a report.json of the suite."),
    ] = None,
    name: Annotated[
        str, option("--name", value=text("NAME"), help="With --add: name of the record's file, without .json.")
    ] = "",
    note: Annotated[str, option("--note", value=text(), help="With --add: a remark for readers.")] = "",
    stand_in: Annotated[
        bool, option("--stand-in", help="With --add: the run used another vendor's device with the same interface.")
    ] = False,
    json_output: JsonOption = False,
) -> CommandReport:
    """Print the support table made from recorded evidence. Options write it, check it, or add a record."""
    del json_output
    from outrider_conformance.reporting.report import MOST_BYTES, load_report, verify
    from outrider_conformance.support import Tier, from_report, load_records, render

    if add is not None:
        if not name:
            raise ConfigError("--add needs --name, the name of the record's file")
        report = load_report(read_utf8(add, "a report of the suite", MOST_BYTES), str(add))
        problems = [problem for problem in verify(report) if "suite" not in problem]
        if problems:
            raise ConfigError(f"{add} doesn't hold: {problems[0]}")
        record = from_report(report, tier=Tier.STAND_IN if stand_in else None, note=note)
        evidence.mkdir(parents=True, exist_ok=True)
        text = json.dumps(record.as_dict(), indent=2, ensure_ascii=False) + "\n"
        write_whole(evidence / f"{name}.json", text)
    records = load_records(evidence)
    page = render(records, COMMAND)
    if write is not None:
        write_whole(write, page)
    same = check is None or (check.is_file() and check.read_bytes() == page.encode())

    def show(console: Console) -> None:
        if write is not None:
            console.print(f"{write}: {len(records)} records")
        elif check is not None:
            console.print(f"{check} is up to date" if same else f"{check} isn't what the records give; run `{COMMAND}`")
        else:
            console.print(page, markup=False, highlight=False, soft_wrap=True)

    data: dict[str, object] = {"records": [record.as_dict() for record in records], "up_to_date": same}
    return CommandReport(data=data, render=show, exit_code=0 if same else 1)
