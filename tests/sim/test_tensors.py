"""The torch device: tensors behave as on an accelerator, whatever order operations run in."""

import copy
import pickle

import pytest
import torch

from outrider.device import DeviceLost

STRATEGIES = ["program", "lazy", "random", "pct"]


@pytest.fixture(params=STRATEGIES)
def device(sim, request):
    return sim(strategy=request.param, seed="5").device


def both(fn, *arguments):
    """The function on the host and on the device."""
    return fn(*arguments), fn(*(a.to("sim") if isinstance(a, torch.Tensor) else a for a in arguments))


def assert_same(fn, *arguments):
    host, device = both(fn, *arguments)
    assert device.device.type == "sim"
    torch.testing.assert_close(device.cpu(), host)
    assert device.dtype == host.dtype
    assert device.shape == host.shape


x = torch.arange(24.0).reshape(4, 6)


@pytest.mark.parametrize(
    "fn",
    [
        lambda t: t + 1,
        lambda t: t @ t.T,
        lambda t: t.softmax(-1),
        lambda t: t.cumsum(0).sort(-1, descending=True).values,
        lambda t: torch.cat([t, t[1:3]]).sum(0),
        lambda t: torch.stack(t.unbind(1)),
        lambda t: t[:, ::2].contiguous().view(-1),
        lambda t: t[torch.tensor([2, 0])],
        lambda t: t[t > 5],
        lambda t: torch.where(t > 5, t, -t),
        lambda t: t.to(torch.bfloat16).float(),
        lambda t: torch.nn.functional.layer_norm(t, (6,)),
        lambda t: torch.nn.functional.scaled_dot_product_attention(t[None], t[None], t[None]),
        lambda t: t.masked_fill(t > 3, 0.0).nonzero(),
        lambda t: torch.arange(3, 9, 2, device=t.device) * t[0, :3].long(),
        lambda t: torch.zeros_like(t).scatter_(0, torch.zeros(1, 6, dtype=torch.int64, device=t.device), t[:1]),
        lambda t: t.repeat_interleave(torch.tensor([1, 2, 0, 1], device=t.device), 0),
        lambda t: torch.topk(t, 2).indices,
        lambda t: torch.split(t, [1, 3])[1].transpose(0, 1),
        lambda t: torch.complex(t, t).conj().imag,
        lambda t: torch.tensor([t[0, 1], t[1, 0]], device=t.device),
    ],
)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_values_agree_with_the_host(device, fn, mode):
    del device
    with mode():
        assert_same(fn, x)


def test_views_share_memory(device):
    t = torch.zeros(3, 4, device=device)
    row, column, flat = t[1], t[:, 2], t.view(-1)
    t.add_(1)
    row.mul_(2)
    flat[0] = 9
    assert column.tolist() == [1.0, 2.0, 1.0]
    assert t[0, 0].item() == 9
    assert row.data_ptr() == t.data_ptr() + 16
    assert t.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


def test_in_place_metadata(device):
    t = torch.arange(6, device=device).view(2, 3)
    t.t_()
    t.unsqueeze_(0)
    assert t.shape == (1, 3, 2)
    assert t.tolist() == [[[0, 3], [1, 4], [2, 5]]]


def test_out_variants_write_in_place_and_resize_nothing_but_empty_tensors(device):
    a = torch.ones(3, device=device)
    out = torch.empty(3, device=device)
    assert torch.add(a, a, out=out) is out
    assert out.tolist() == [2.0] * 3
    empty = torch.empty(0, device=device)
    assert torch.add(a, a, out=empty) is empty
    assert empty.tolist() == [2.0] * 3
    with pytest.raises(RuntimeError, match="can't be resized"):
        torch.add(a, a, out=torch.empty(2, device=device))


def test_devices_dont_mix(device):
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(3, device=device) + torch.ones(3)
    assert (torch.ones(3, device=device) * torch.tensor(2.0)).tolist() == [2.0] * 3


def test_shape_errors_come_at_the_call(device):
    with pytest.raises(RuntimeError):
        torch.ones(3, device=device) + torch.ones(4, device=device)


def test_the_host_cant_see_device_memory(device):
    t = torch.ones(3, device=device)
    with pytest.raises(TypeError, match=r"Tensor\.cpu"):
        t.numpy()
    assert "sim:0" in repr(t)


def test_a_queued_copy_keeps_its_own_source(sim):
    backend = sim(strategy="lazy")
    host = torch.ones(4)
    moved = torch.empty(4, device=backend.device)
    moved.copy_(host, non_blocking=True)
    host.fill_(5)
    assert moved.tolist() == [1.0] * 4


def test_pickle_and_deepcopy(device):
    t = torch.arange(3.0, device=device)[1:]
    assert pickle.loads(pickle.dumps(t)).tolist() == [1.0, 2.0]
    assert copy.deepcopy(torch.nn.Parameter(t))._is_param


def test_random_numbers_depend_on_the_seed_alone(sim):
    drawn = []
    for strategy in STRATEGIES:
        device = sim(strategy=strategy, seed="1").device
        torch.manual_seed(3)
        drawn.append((torch.randn(4, device=device).tolist(), torch.randperm(6, device=device).tolist()))
    assert drawn == [drawn[0]] * len(STRATEGIES)


def test_a_custom_operator_is_one_operation(sim):
    backend = sim(strategy="lazy")
    residual, weight = torch.ones(2, 4, device=backend.device), torch.ones(4, device=backend.device)
    given = torch.ones(2, 4, device=backend.device)
    backend.synchronize()
    before = backend.sim.machine.runs
    normed = backend.kernels.add_rms_norm(given, residual, weight, 1e-6)
    backend.synchronize()
    assert backend.sim.machine.runs == before + 1
    assert residual.tolist() == [[2.0] * 4] * 2
    torch.testing.assert_close(normed.cpu(), torch.ones(2, 4))


def test_an_index_out_of_range_loses_the_device(sim):
    backend = sim(strategy="lazy")
    table = torch.zeros(4, 2, device=backend.device)
    table[torch.tensor([9], device=backend.device)] += 0
    with pytest.raises(DeviceLost, match=r"aten::index.*IndexError"):
        backend.synchronize()
    with pytest.raises(DeviceLost):
        torch.ones(1, device=backend.device)
    backend.control.reset()
    assert torch.ones(1, device=backend.device).item() == 1


def test_fresh_memory_is_poisoned(device):
    assert torch.empty(3, device=device).isnan().all().item()
    assert torch.empty(3, device=device, dtype=torch.int64).min().item() > 1 << 60


def test_devices_of_two_backends_dont_mix(sim):
    """Their queues know nothing of each other, so nothing would order what one reads of the other's."""
    here, there = sim(), sim()
    mine = here.create_stream("mine")
    with here.on(mine):
        weights = torch.ones(3, device=here.device)
    with (
        there.on(there.create_stream("theirs")),
        pytest.raises(RuntimeError, match="another simulated device than the current"),
    ):
        weights + 1
    with here.on(mine):
        assert (weights + 1).tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    "made",
    [
        torch.empty_like,
        torch.zeros_like,
        torch.rand_like,
        lambda t, device: torch.full_like(t, 2.0, device=device),
        lambda t, device: t.new_empty(3, device=device),
        lambda t, device: t.new_zeros(3, device=device),
    ],
)
def test_a_tensor_made_like_one_of_the_device_lands_where_it_is_asked_for(made, device):
    like = torch.ones(4, device=device)
    assert made(like, device="cpu").device.type == "cpu"
    assert made(like, device=device).device == like.device
    assert torch.zeros_like(like, device="cpu").tolist() == [0.0] * 4


def test_the_bytes_of_a_storage_go_to_the_host_and_back(device):
    x = torch.arange(4.0, device=device)
    kept = x.untyped_storage().cpu()
    x.zero_()
    x.untyped_storage().copy_(kept)
    assert x.tolist() == [0.0, 1.0, 2.0, 3.0]
