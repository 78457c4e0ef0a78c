"""Tables of tuned kernels: what the package ships can be used, and what is broken says so."""

import json
from dataclasses import replace
from importlib import resources

import pytest

pytest.importorskip("triton", reason="not run: triton isn't installed; the set-up has it on Linux on x86-64 alone")

from outrider.device import BackendLoadError
from outrider_triton.tiles.configs import AttentionConfig
from outrider_triton.tiles.store import shipping
from outrider_triton.tiles.store import table as tables
from outrider_triton.tiles.store.table import load, parse, table_name

SHIPPED = sorted(path.name for path in resources.files("outrider_triton.tiles.store").joinpath("tuned").iterdir())


@pytest.mark.parametrize("name", SHIPPED)
def test_a_table_of_the_package_says_what_was_measured(name):
    data = json.loads(resources.files("outrider_triton.tiles.store").joinpath("tuned", name).read_text())
    assert f"{table_name(data['device'])}.json" == name
    table = parse(data)
    assert {"torch", "triton"} <= set(table.software)
    assert load(data["device"]) == table
    for entries in (each for layers in table.entries.values() for each in layers.values()):
        assert [entry.m for entry in entries] == sorted({entry.m for entry in entries})
        assert all(entry.us > 0 and entry.torch_us > 0 for entry in entries)


def test_a_device_without_a_table():
    assert load("No Such Chip 9000") is None


@pytest.mark.parametrize("text", ["{", '{"matmul": []}', '{"device": "x", "software": {}, "matmul": [{"m": 1}]}'])
def test_a_broken_table_says_what_to_do(text, tmp_path, monkeypatch):
    (tmp_path / "tuned").mkdir()
    (tmp_path / "tuned" / "x.json").write_text(text)
    monkeypatch.setattr(tables.resources, "files", lambda package: tmp_path)
    with pytest.raises(BackendLoadError, match="restore the file"):
        load("X")


def test_attention_takes_the_nearest_measurement():
    table = parse(
        {
            "device": "made up",
            "software": {},
            "matmul": [],
            "attention": [
                {"groups": 8, "max_kv": 640, "config": [64, 8, 4, 2]},
                {"groups": 256, "max_kv": 640, "config": [128, 1, 8, 2]},
            ],
        }
    )
    assert table.attention_config(8, 128, 4) == AttentionConfig(64, 8, 4, 2)
    assert table.attention_config(200, 128, 4) == table.attention_config(512, 128, 4) == AttentionConfig(128, 1, 8, 2)
    assert table.attention_config(4096, 128, 4) is None  # so many were not measured
    assert table.attention_config(40, 128, 4) is None  # too far from both
    assert table.attention_config(8, 64, 4) is table.attention_config(8, 128, 7) is None  # other heads were not measured
    rows = [{"groups": groups, "max_kv": 640, "config": [64, groups, 4, 2]} for groups in (8, 32)]
    for order in (rows, rows[::-1]):  # as near to both, in whatever order a cache is read
        between = parse({"device": "x", "software": {}, "matmul": [], "attention": order})
        assert between.attention_config(16, 128, 4) == AttentionConfig(64, 8, 4, 2)


def test_what_was_measured_for_more_tokens_says_nothing_about_few():
    row = {"operator": "linear", "dtype": "bfloat16", "n": 64, "k": 64, "config": None, "us": 1.0, "torch_us": 2.0}
    rows = [{**row, "m": 4}, {**row, "m": 32}]
    table = parse({"device": "made up", "software": {}, "matmul": rows})
    found = {m: table.entry("linear", "bfloat16", n=64, k=64, m=m) for m in (1, 4, 5, 8, 9, 16, 17, 32, 33)}
    assert {m for m, entry in found.items() if entry is not None} == {1, 4, 17, 32}


def test_a_tile_serves_as_many_tokens_as_it_has_room_for():
    row = {"operator": "linear", "dtype": "bfloat16", "n": 64, "k": 64, "us": 1.0, "torch_us": 2.0}
    rows = [{**row, "m": m, "config": [room, 32, 128, 1, 4, 4, 0, 2, 32]} for m, room in ((4, 8), (16, 16))]
    table = parse({"device": "made up", "software": {}, "matmul": rows})
    found = {m: table.entry("linear", "bfloat16", n=64, k=64, m=m) for m in (1, 4, 5, 8, 9, 16, 17)}
    assert {m: entry.m for m, entry in found.items() if entry is not None} == {1: 4, 4: 4, 5: 4, 8: 4, 9: 16, 16: 16}


ROW = {"operator": "linear", "dtype": "bfloat16", "n": 64, "k": 64, "m": 8, "config": None, "us": 1.0, "torch_us": 2.0}
HEADS = {"groups": 8, "max_kv": 640, "config": [64, 8, 4, 2]}


def _kept(folder, *rows):
    home = folder / "made-up-sm_90-132" / "2.11.0+cu130-3.6.0-0123456789abcdef"
    home.mkdir(parents=True, exist_ok=True)
    for number, row in enumerate(rows):
        (home / f"{number}.json").write_text(json.dumps(row))
    return [str(home / f"{number}.json") for number in range(len(rows))]


def test_choices_that_were_kept_go_into_a_table_that_ships(tmp_path):
    file, said = tmp_path / "made-up.json", ["--device", "Made up", "--date", "2026-11-24"]
    shipping.main([str(file), *_kept(tmp_path, ROW, {**ROW, "m": 32}, HEADS), *said])
    first = parse(json.loads(file.read_text()))
    assert first.software == {"torch": "2.11.0+cu130", "triton": "3.6.0"}
    better = {**ROW, "us": 0.5}
    other = {**HEADS, "head_size": 64, "group": 4}
    shipping.main(
        [str(file), *_kept(tmp_path, better, {**HEADS, "head_size": 128, "group": 4, "config": [32, 4, 4, 2]}, other), *said]
    )
    second = parse(json.loads(file.read_text()))
    ((entries,),) = (layers.values() for layers in second.entries.values())
    assert [(entry.m, entry.us) for entry in entries] == [(8, 0.5), (32, 1.0)]
    assert [entry.head_size for entry in second.attention] == [128, 64]
    assert second.attention[0] == replace(first.attention[0], config=AttentionConfig(32, 4, 4, 2))


@pytest.mark.parametrize(
    ("name", "device", "said"),
    [("x.json", "Made up", "is called made-up.json"), ("other.json", "Other", "one folder of 'Other'")],
)
def test_choices_of_another_device_go_into_no_table(name, device, said, tmp_path, capsys):
    with pytest.raises(SystemExit):
        shipping.main([str(tmp_path / name), *_kept(tmp_path, ROW), "--device", device, "--date", "2026-11-24"])
    assert said in capsys.readouterr().err
    assert not (tmp_path / name).exists()


def test_a_choice_that_cant_be_read_leaves_the_table_alone(tmp_path):
    said = ["--device", "Made up", "--date", "2026-11-24"]
    file = tmp_path / "made-up.json"
    shipping.main([str(file), *_kept(tmp_path, ROW), *said])
    before = file.read_text()
    with pytest.raises(KeyError):
        shipping.main([str(file), *_kept(tmp_path, {key: value for key, value in ROW.items() if key != "us"}), *said])
    assert file.read_text() == before
