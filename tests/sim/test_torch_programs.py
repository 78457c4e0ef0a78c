"""What programs that know torch alone do with a device: save, load, compile, cast, pin, draw, differentiate."""

import io
import subprocess
import sys

import pytest
import torch
from torch import nn

from outrider.device import OutOfDeviceMemory


@pytest.fixture(params=["program", "lazy"])
def device(sim, request):
    return sim(strategy=request.param).device


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_an_out_overload_that_resizes_isnt_used(device, reduction):
    given, target = torch.rand(4, 5), torch.rand(4, 5)
    loss = nn.functional.binary_cross_entropy
    torch.testing.assert_close(
        loss(given.to(device), target.to(device), reduction=reduction).cpu(), loss(given, target, reduction=reduction)
    )


def test_out_overloads_that_torch_does_otherwise_for_tensors_in_python(device):
    x = torch.eye(3)
    rank = torch.empty((), dtype=torch.int64, device=device)
    torch.linalg.matrix_rank(x.to(device), out=rank)
    assert rank.item() == 3
    product = torch.empty(2, 3, 3, device=device)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch.matmul(x.expand(2, 3, 3).to(device), x.to(device), out=product)
        assert product[1].tolist() == x.tolist()


def test_what_the_host_cant_compute_is_refused_at_the_call(device):
    with pytest.raises(NotImplementedError, match=r"aten::_to_sparse: the result would be torch\.sparse_coo"):
        torch.eye(3, device=device).to_sparse()
    with pytest.raises(NotImplementedError, match=r"aten::quantize_per_tensor: the result would be quantized"):
        torch.quantize_per_tensor(torch.ones(2, device=device), 0.1, 0, torch.qint8)
    with pytest.raises(NotImplementedError, match=r"aten::linalg_cholesky_ex.*can't do this"):
        torch.linalg.cholesky(torch.eye(3, device=device, dtype=torch.float16))
    assert torch.ones(1, device=device).item() == 1


@pytest.mark.parametrize("module", [nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3), nn.LayerNorm(8), nn.GroupNorm(1, 3)], ids=repr)
def test_inputs_that_need_no_gradient(device, module):
    given = torch.randn(2, 3, 8, 8)
    there = type(module)(*_arguments(module))
    there.load_state_dict(module.state_dict())
    there.to(device)
    module.zero_grad()
    module(given).square().sum().backward()
    there(given.to(device)).square().sum().backward()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(there.get_parameter(name).grad.cpu(), parameter.grad, rtol=1e-4, atol=1e-3)


def _arguments(module):
    return {"Conv2d": (3, 3, 3), "BatchNorm2d": (3,), "LayerNorm": (8,), "GroupNorm": (1, 3)}[type(module).__name__]


def test_errors_in_a_backward_are_raised(sim):
    """Torch's engine would end the process."""
    held = sim(memory="4096")
    with held.on(held.create_stream("forward")):
        weight = torch.ones(512, device=held.device, requires_grad=True)
        total = weight.sum()
        with pytest.raises(OutOfDeviceMemory, match="don't fit"):
            total.backward()
    assert held.sim.machine.lost is None


def test_loading_for_the_device_and_saving_from_it(device):
    tied = torch.arange(6.0)
    assert torch.load(saved({"a": tied, "b": tied[2:4]}), map_location=device)["b"].tolist() == [2.0, 3.0]
    loaded = torch.load(saved({"a": tied, "b": tied[2:4]}), map_location="sim")
    loaded["a"].fill_(1)
    assert loaded["b"].tolist() == [1.0, 1.0]
    assert loaded["b"].device.type == "sim"
    module = nn.Linear(2, 2).to(device)
    for where in (None, "sim", "cpu"):
        state = torch.load(saved(module.state_dict()), map_location=where)
        assert state["weight"].device.type == (where or "sim")
        assert state["weight"].tolist() == module.weight.tolist()
    whole = torch.load(saved(module), weights_only=False)
    assert isinstance(whole.weight, nn.Parameter)
    half = torch.ones(3, dtype=torch.float8_e4m3fn, device=device)
    assert torch.load(saved(half)).float().tolist() == [1.0] * 3
    base = torch.zeros(4, device=device)
    again = torch.load(saved([base, base[1:]]))
    again[0].fill_(2)
    assert again[1].tolist() == [2.0] * 3


@pytest.mark.slow
def test_a_file_from_the_device_loads_where_there_is_none(device, tmp_path):
    torch.save({"a": torch.ones(3, device=device)}, tmp_path / "a.pt")
    code = f"import torch; print(torch.load({str(tmp_path / 'a.pt')!r}, map_location='cpu')['a'].tolist())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[1.0, 1.0, 1.0]"


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_functions(sim, backend):
    there = sim()
    x = torch.randn(3)

    def fn(t):
        return (t * 2 + 1).relu().sum()

    given = x.to(there.device).requires_grad_()
    before = there.sim.machine.runs
    result = torch.compile(fn, backend=backend)(given)
    result.backward()
    assert there.sim.machine.runs > before + 3  # on the device, one operation after the other
    here = x.requires_grad_()
    fn(here).backward()
    torch.testing.assert_close(given.grad.cpu(), here.grad)


@pytest.mark.slow
def test_export(device):
    module = nn.Sequential(nn.Linear(3, 3), nn.ReLU()).to(device)
    given = torch.randn(2, 3, device=device)
    exported = torch.export.export(module, (given,))
    torch.testing.assert_close(exported.module()(given).cpu(), module(given).cpu())


def test_own_generators(device):
    one, two = (torch.Generator(device).manual_seed(3) for _ in range(2))
    assert isinstance(one, torch.Generator)
    assert one.device.type == "sim"
    first = torch.randn(3, device=device, generator=one)
    assert first.tolist() == torch.randn(3, device=device, generator=two).tolist()
    assert first.tolist() != torch.randn(3, device=device, generator=one).tolist()
    state = one.get_state()
    again = torch.rand(2, device=device, generator=one).tolist()
    one.set_state(state)
    assert torch.rand(2, device=device, generator=one).tolist() == again
    assert torch.Generator().device.type == "cpu"


def test_autocast(device):
    x, weight = torch.randn(3, 3, device=device), torch.randn(3, 3, device=device, requires_grad=True)
    with torch.autocast("sim", dtype=torch.bfloat16):
        product = x @ weight
        assert product.dtype == torch.bfloat16
        assert product.softmax(-1).dtype == torch.float32
        assert product.sum().dtype == torch.float32
        assert torch.addcmul(product, x, product).dtype == torch.float32
        assert (product + 1).dtype == torch.bfloat16
        with torch.autocast("sim", enabled=False):
            assert (x @ weight).dtype == torch.float32
        with pytest.raises(RuntimeError, match="unsafe under autocast"):
            nn.functional.binary_cross_entropy(x.sigmoid(), x.sigmoid())
    product.sum().backward()
    assert weight.grad.dtype == torch.float32


def test_the_accelerator_module_and_torchs_own_streams(sim):
    backend = sim(strategy="lazy")
    assert torch.accelerator.current_accelerator() == torch.device("sim")
    stream, event = torch.Stream("sim"), torch.Event("sim")
    assert isinstance(stream, torch.Stream)
    with stream:
        x = torch.ones(3, device=backend.device)
        assert torch.accelerator.current_stream() == stream
        event.record(stream)
    assert not event.query()
    torch.accelerator.synchronize()
    assert event.query()
    assert x.tolist() == [1.0] * 3


def test_factories_of_pinned_memory(device):
    del device
    made = [
        torch.empty(3, pin_memory=True),
        torch.zeros(2, 3, pin_memory=True),
        torch.full((2,), 7, pin_memory=True),
        torch.tensor([1, 2], pin_memory=True),
        torch.ones_like(torch.empty(3), pin_memory=True),
        torch.empty_strided((2, 3), (3, 1), pin_memory=True),
    ]
    assert all(tensor.is_pinned() for tensor in made)
    assert made[2].tolist() == [7, 7]
    assert not torch.empty(3).is_pinned()
    batches = torch.utils.data.DataLoader(torch.arange(4.0).view(2, 2), pin_memory=True)
    assert all(batch.is_pinned() for batch in batches)


def test_transforms(device):
    x = torch.randn(3, 4)
    torch.testing.assert_close(torch.vmap(lambda t: t.sin().sum())(x.to(device)).cpu(), x.sin().sum(1))
    grad = torch.func.grad(lambda t: (t**2).sum())
    torch.testing.assert_close(grad(x.to(device)).cpu(), 2 * x)


def test_memory_that_a_stream_recorded_waits_for_what_the_stream_holds_at_the_release(sim):
    backend = sim(strategy="lazy", poison="off")
    side = backend.create_stream("side")
    x = torch.ones(4, device=backend.device)
    backend.synchronize()
    place = x.data_ptr()
    x.record_stream(side.native)
    with backend.on(side):
        y = x + 1  # enqueued after the call
    del x
    assert torch.ones(4, device=backend.device).data_ptr() != place
    backend.synchronize()
    assert torch.ones(4, device=backend.device).data_ptr() == place
    assert y.tolist() == [2.0] * 4


@pytest.mark.parametrize("pinned", [False, True], ids=["pageable", "pinned"])
def test_a_tensor_like_one_of_the_host_is_made_on_the_device(device, pinned):
    host = torch.ones(3, 4).pin_memory() if pinned else torch.ones(4, 3).t()
    made = {
        "zeros": torch.zeros_like(host, device=device),
        "ones": torch.ones_like(host, device=device, dtype=torch.int32),
        "full": torch.full_like(host, 7.0, device=device),
        "rand": torch.rand_like(host, device=device),
        "empty": torch.empty_like(host, device=device),
    }
    for tensor in made.values():
        assert tensor.device == device
        assert tensor.shape == host.shape
        assert tensor.stride() == host.stride()
    assert made["zeros"].sum().item() == 0
    assert made["ones"].dtype == torch.int32
    assert made["full"].tolist() == [[7.0] * 4] * 3
    assert 0 < made["rand"].mean().item() < 1


def test_a_stream_s_context_can_be_entered_again_and_within_itself(device):
    side = torch.sim.Stream(device)
    before = torch.sim.current_stream()
    context = torch.sim.stream(side)
    for _ in range(2):
        with context:
            assert torch.sim.current_stream() == side
            with context:
                assert torch.sim.current_stream() == side
            assert torch.sim.current_stream() == side
        assert torch.sim.current_stream() == before
    with torch.sim.stream(None):
        assert torch.sim.current_stream() == before
