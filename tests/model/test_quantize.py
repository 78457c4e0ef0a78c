"""Checkpoints that ``outrider quantize`` writes; and parts of quantised weights, as ranks have them."""

import json
import os
from dataclasses import replace

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from model.harness import Driver
from model.quantized_checkpoints import off_the_border
from outrider.cli.main import main
from outrider.device import QuantizedWeight
from outrider.device.kernels.formats import FP4
from outrider.device.kernels.reference.model import dequantize, spread
from outrider.device.kernels.weight_formats import WEIGHT_FORMATS, weight_format
from outrider.device.kernels.weights import quantized_products
from outrider.model import load_decoder, load_eagle, open_head
from outrider.model.checkpoint.files import TensorSlice
from outrider.model.quantization.loading import pad_rows, slice_weight, stack_weights, to_device
from outrider.model.quantization.storages import COMPRESSED_STORAGES, Scheme
from outrider.model.quantization.writing import compressed_config
from outrider_proof.checkpoints import write_eagle
from tiny_checkpoints import write_checkpoint

PROMPT = [1, 17, 44, 90, 5, 61, 61, 8]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    directory = tmp_path_factory.mktemp("plain")
    write_checkpoint(directory, "llama", shards=3, intermediate_size=64)
    (directory / "tokenizer.json").write_text("{}")
    return directory


def quantize(capfd, *arguments):
    code = main(["quantize", "--json", *map(str, arguments)])
    return code, json.loads(capfd.readouterr().out)


@pytest.mark.parametrize("format", ["fp8", "int8", "int4"])
def test_transformers_reads_what_is_written(tmp_path, backend, plain, capfd, format, monkeypatch):
    """The same logits by its own quantised run, the head quantised in two of three."""
    import transformers

    off_the_border(monkeypatch)
    head = [] if format == "int8" else ["--lm-head"]
    group = ["--group", 16] if format.startswith("int4") else []
    code, said = quantize(capfd, "--model", plain, "--format", format, "--out", tmp_path / "q", *group, *head)
    assert (code, said["quantized"], said["plain"]) == (0, 21 + len(head), 9 - len(head))
    assert said["bytes_after"] < said["bytes_before"]
    assert len(list((tmp_path / "q").glob("*.safetensors"))) == 4
    assert (tmp_path / "q" / "tokenizer.json").read_text() == "{}"
    groups = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]["config_groups"]
    assert groups["group_0"]["targets"] == [
        "Linear",
        *(["lm_head"] if head else []),
    ]  # by its name for vLLM, whose class is other
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype=torch.float32).eval()
    with torch.no_grad():
        wanted = reference(torch.tensor([PROMPT])).logits[0]
    model = load_decoder(tmp_path / "q", backend=backend, dtype=torch.float32)
    driver = Driver(model)
    assert (driver.logits([(driver.sequence(), PROMPT)]) - wanted).abs().max() < 1e-4
    assert sum(quantized_products(model.weights).values()) == 12 + len(head)


def test_what_lies_beside_the_weights_goes_along(tmp_path, capfd):
    write_eagle(tmp_path / "plain")
    more = tmp_path / "plain" / "additional_chat_templates" / "tool_use.jinja"
    more.parent.mkdir()
    more.write_text("{{ messages }}")
    (tmp_path / "plain" / "original").mkdir()
    assert quantize(capfd, "--model", tmp_path / "plain", "--format", "fp8", "--out", tmp_path / "q")[1]["runs_here"]
    assert sorted(each.name for each in (tmp_path / "q").iterdir() if each.is_dir()) == ["additional_chat_templates"]
    assert (tmp_path / "q" / "additional_chat_templates" / "tool_use.jinja").read_text() == "{{ messages }}"


def test_a_family_that_runs_elsewhere_alone(tmp_path, capfd):
    write_eagle(tmp_path / "plain")
    path = tmp_path / "plain" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "gemma"}))
    assert main(["quantize", "--model", str(tmp_path / "plain"), "--format", "fp8", "--out", str(tmp_path / "q")]) == 0
    told = " ".join(capfd.readouterr().out.split())
    assert "for other engines: Outrider runs quantised weights of deepseek_v2, deepseek_v3, dots1, ernie4_5, " in told
    assert "type is 'gemma'" in told


def test_a_head_that_drafts(tmp_path, backend, plain, capfd):
    write_eagle(tmp_path / "head")
    assert quantize(capfd, "--model", tmp_path / "head", "--format", "fp8", "--out", tmp_path / "q")[0] == 0
    target = load_decoder(plain, backend=backend, dtype=torch.float32)
    head = load_eagle(open_head(tmp_path / "q", target=target, backend=backend, dtype=torch.float32))
    assert isinstance(head.weights.fusion, QuantizedWeight)
    own = load_eagle(open_head(tmp_path / "head", target=target, backend=backend, dtype=torch.float32))
    weight = head.weights.layers[0].down
    made = dequantize(weight.data, weight.scales, None, "fp8", weight.block, weight.shape, torch.float32)
    assert (made - own.weights.layers[0].down).abs().max() < 0.04 * made.abs().max()


def test_what_cannot_be_written(tmp_path, plain, capfd, monkeypatch):
    def error(*arguments):
        code, said = quantize(capfd, *arguments)
        assert code in (1, 2)  # 2 for a value that is wrong by itself
        return said["error"]["message"]

    out = tmp_path / "q"
    assert "is there already" in error("--model", plain, "--format", "fp8", "--out", plain)
    assert "--format is 'fp4'; expected one of fp8, fp8-tensor" in error("--model", plain, "--format", "fp4", "--out", out)
    assert "--group is 32, and int8 has no scales of groups" in error(
        "--model", plain, "--format", "int8", "--group", "32", "--out", out
    )
    assert "columns, no multiple of the group 128" in error("--model", plain, "--format", "int4", "--out", out)
    write_checkpoint(tmp_path / "tied", "llama-tied")
    assert "none of its own: it's the embedding, which stays plain; leave --lm-head out" in error(
        "--model", tmp_path / "tied", "--format", "fp8", "--out", out, "--lm-head"
    )
    held = load_file(tmp_path / "tied" / "model.safetensors")
    held["model.layers.0.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(held, tmp_path / "tied" / "model.safetensors")
    assert "up_proj.weight' has values that aren't finite" in error(
        "--model", tmp_path / "tied", "--format", "fp8", "--out", out
    )
    for total, said in ((1000, "no space left on the device"), (0, "holds no files of others")):  # 0: as /proc has
        used = type("Usage", (), {"free": min(total, 100), "total": total})
        with monkeypatch.context() as patched:
            patched.setattr("shutil.disk_usage", lambda path, used=used: used)
            assert said in error("--model", plain, "--format", "fp8", "--out", out)
    assert quantize(capfd, "--model", plain, "--format", "fp8", "--out", out)[0] == 0
    assert "is quantised already" in error("--model", out, "--format", "int8", "--out", tmp_path / "again")
    assert sorted(os.listdir(tmp_path)) == ["q", "tied"]  # nothing is left of what failed


@pytest.mark.parametrize("copy", [True, False])
def test_a_tied_table_is_no_head(tmp_path, capfd, backend, copy):
    """A checkpoint may hold the embedding and a copy of it, or the embedding under the name of the head alone."""
    write_checkpoint(tmp_path / "tied", "llama-tied")
    path = tmp_path / "tied" / "model.safetensors"
    held = load_file(path)
    held["lm_head.weight"] = held["model.embed_tokens.weight"].clone()
    save_file({key: held[key] for key in held if copy or "embed" not in key}, path)
    asked = ("--model", tmp_path / "tied", "--format", "fp8", "--out", tmp_path / "q")
    code, said = quantize(capfd, *asked, "--lm-head")
    assert code == 1
    assert "none of its own: it's the embedding, which stays plain; leave --lm-head out" in said["error"]["message"]
    assert quantize(capfd, *asked)[0] == 0
    load_decoder(tmp_path / "q", backend=backend, dtype=torch.float32)


def drawn(format, out, into, block, zeros, seed):
    generator = torch.Generator().manual_seed(seed)
    grid = (-(-out // block[0]), -(-into // block[1]))
    if format == "fp8":
        data = torch.randn(out, into, generator=generator).to(torch.float8_e4m3fn)
    elif format == "int8":
        data = torch.randint(-128, 128, (out, into), generator=generator).to(torch.int8)
    else:
        data = torch.randint(0, 256, (out, -(-into // 2)), generator=generator).to(torch.uint8)
    return QuantizedWeight(
        format=format,
        data=data,
        scales=torch.rand(grid, generator=generator) + 0.1,
        block=block,
        shape=(out, into),
        zero_points=torch.randint(-8, 8, grid, generator=generator).to(torch.int8) if zeros and format != "fp8" else None,
    )


def value(weight):
    return dequantize(
        weight.data, weight.scales, weight.zero_points, weight.format, weight.block, weight.shape, torch.float64
    )


@settings(max_examples=60)
@given(
    st.sampled_from(["fp8", "int8", "int4"]),
    st.tuples(st.integers(1, 20), st.integers(1, 20)),
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    st.integers(1, 24),
    st.booleans(),
    st.data(),
)
def test_parts_stacks_and_padding_are_exact(format, rows, blocks, into, zeros, data):
    """Bit for bit, off every border of blocks and groups."""
    one, other = (drawn(format, out, into, (down, 5), zeros, out) for out, down in zip(rows, blocks, strict=True))
    both = stack_weights([one, other])
    assert torch.equal(value(both), torch.cat((value(one), value(other))))
    more = pad_rows(both, 3)
    assert torch.equal(value(more), torch.nn.functional.pad(value(both), (0, 0, 0, 3)))
    dim = data.draw(st.integers(0, 1))
    start = data.draw(st.integers(0, both.shape[dim] - 1))
    stop = data.draw(st.integers(start + 1, both.shape[dim]))
    assert torch.equal(value(slice_weight(both, TensorSlice(dim, start, stop))), value(both).narrow(dim, start, stop - start))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_scale_of_a_row_is_wide_and_one_of_a_group_as_it_is_stored(dtype):
    """Exactly the same number, in a dtype that libraries take."""
    weight = torch.randn(8, 192, generator=torch.Generator().manual_seed(3)).to(dtype)
    wide = torch.float32 if dtype is torch.bfloat16 else dtype
    for format, kept in (("fp8", wide), ("int8", wide), ("int4", dtype)):
        made = weight_format(format).fitted(192).quantize(weight)
        stored = made.scales.to(dtype)
        loaded = to_device(replace(made, scales=stored), torch.device("cpu"))
        for each in (made, loaded):
            assert each.scales.dtype is kept
            assert torch.equal(each.scales.double(), stored.double())


def test_floats_of_four_bits_round_to_the_nearest():
    """Ties go to the even mantissa, numbers beyond the range to its end. Each code is read as it was written."""
    numbers = torch.tensor([0, 0.25, 0.26, 0.75, 1.25, 1.75, 1.76, 2.5, 3.5, 5, 5.1, 7, torch.inf, -0.25, -2.6, -9])
    rounded = torch.tensor([0, 0, 0.5, 1, 1, 2, 2, 2, 4, 4, 6, 6, 6, 0, -3, -6])
    assert torch.equal(FP4.round(numbers), rounded)
    assert FP4.round(torch.tensor([torch.nan])).isnan().all()
    codes = torch.arange(256, dtype=torch.uint8).view(2, 128)
    values = FP4.decode(codes, 256, torch.float64)
    assert values[0, :32:2].tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert torch.equal(FP4.round(values), values)
    assert torch.equal(FP4.encode(values), codes)


def test_powers_of_two_are_the_scales_of_the_specification():
    """The exponent of the largest number of a block less two, which is that of 6; 1 for zeros; within the range of e8m0."""
    largest = torch.tensor([6.0, 4.0, 7.99, 8.0, 0.0, 2.0**-140, 2.0**127])
    weight = torch.zeros(7, 32).index_fill_(1, torch.tensor([5]), 1) * -largest.unsqueeze(1)
    made = weight_format("mxfp4").quantize(weight)
    assert made.scales.view(torch.uint8).flatten().tolist() == [127, 127, 127, 128, 127, 0, 252]
    assert torch.equal(value(made)[[0, 1, 3, 4, 6]], weight[[0, 1, 3, 4, 6]].double())


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_what_is_written_is_read_back(name):
    """Bit for bit, here and by the library, and the nearest values: within half a step, where a step is one scale.

    Transformers 5.23 loads no packed zero points, not even the library's own.
    """
    format, weight = weight_format(name), torch.randn(136, 256, generator=torch.Generator().manual_seed(4))
    made = format.quantize(weight)
    scheme = Scheme(format, COMPRESSED_STORAGES[format.elements.compressed_name], "here")
    tensors = scheme.storage.write(format, made, torch.float32)
    for each in scheme.stored((136, 256)):
        assert tensors[each.suffix].dtype in each.dtypes
        assert tuple(tensors[each.suffix].shape) in each.shapes
    assert torch.equal(value(scheme.storage.read(format, (136, 256), tensors, grouped=True)), value(made))
    (group,) = QuantizationConfig.model_validate(compressed_config(format, ["lm_head"])).config_groups.values()
    library = BaseCompressor.get_value_from_registry(group.format).decompress(dict(tensors), group)["weight"]
    assert torch.equal(library, value(made).float())
    scales = spread(made.scales.double(), made.block, made.shape)
    size, steps = value(made).abs(), scales
    if format.elements.is_float:
        steps = scales * (size / scales).clamp(min=1) / (2 if format.elements.bits == 4 else 8)
    error = (value(made) - weight).abs()
    if format.power_scales:  # the scale may be too small for the largest numbers of a block
        is_largest = size == 6 * scales
        assert ((size < weight.abs())[is_largest]).any()
        assert (weight.abs() < 8 * scales).all()
        error = error.where(~is_largest | (weight.abs() < size), 0)
    assert (error <= 0.5001 * steps).all()
