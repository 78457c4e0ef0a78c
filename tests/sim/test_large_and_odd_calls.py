"""Calls that torch answers otherwise for their looks than for their values, and operands that stay on the host."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F


@pytest.fixture
def device(sim):
    return sim().device


def test_a_large_batch_norm_without_training(device):
    x, ones, zeros = torch.randn(64, 32, 32, 32), torch.ones(32), torch.zeros(32)
    there = F.batch_norm(x.to(device), zeros.to(device), ones.to(device))
    torch.testing.assert_close(there.cpu(), F.batch_norm(x, zeros, ones))


def test_a_large_bag_of_embeddings(device):
    weight, index = torch.randn(20000, 100), torch.arange(1000).view(100, 10)
    there = F.embedding_bag(index.to(device), weight.to(device))
    torch.testing.assert_close(there.cpu(), F.embedding_bag(index, weight))


def test_results_that_depend_on_data_go_into_out(device):
    x = torch.tensor([1.0, -1.0, 2.0], device=device)
    places, values = torch.empty(0, dtype=torch.int64, device=device), torch.empty(2, device=device)
    assert torch.nonzero(x > 0, out=places) is places
    assert torch.masked_select(x, x > 0, out=values) is values
    assert (places.tolist(), values.tolist()) == ([[0], [2]], [1.0, 2.0])
    with pytest.raises(RuntimeError, match=r"masked_select.*has shape"):
        torch.masked_select(x, x > 0, out=torch.empty(3, device=device))


def test_ends_of_a_range_on_the_device(device):
    end = torch.tensor(3.0, device=device)
    assert torch.linspace(0, end, 4, device=device).tolist() == [0.0, 1.0, 2.0, 3.0]
    assert torch.linspace(end, end + 1, 2, device="cpu").tolist() == [3.0, 4.0]


def test_a_backward_that_makes_zeros(device):
    x = torch.randn(4, device=device, requires_grad=True)
    x.sgn().sum().backward()
    assert x.grad.tolist() == [0.0] * 4


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_packed_sequences(device, kind):
    torch.manual_seed(0)
    net, parts = kind(5, 4), [torch.randn(n, 5) for n in (4, 2, 1)]
    packed = nn.utils.rnn.pack_sequence(parts)
    expected = net(packed)[0].data
    expected.sum().backward()
    slope = net.weight_ih_l0.grad.clone()
    net.zero_grad()
    net.to(device)
    there = net(nn.utils.rnn.pack_sequence([part.to(device) for part in parts]))[0].data
    there.sum().backward()
    torch.testing.assert_close(there.cpu(), expected)
    torch.testing.assert_close(net.weight_ih_l0.grad.cpu(), slope)


def test_a_loss_with_lengths_on_the_host(device):
    logs, targets = torch.randn(6, 2, 5).log_softmax(-1), torch.tensor([[1, 2], [3, 4]])
    lengths = torch.tensor([6, 5]), torch.tensor([2, 1])
    there = logs.to(device).requires_grad_()
    loss = F.ctc_loss(there, targets.to(device), *lengths)
    torch.testing.assert_close(loss.detach().cpu(), F.ctc_loss(logs, targets, *lengths))
    loss.backward()


def test_checkpointing_drops_the_same_again(device):
    from torch.utils.checkpoint import checkpoint

    x = torch.ones(100, device=device, requires_grad=True)
    y = checkpoint(lambda t: F.dropout(t, 0.5), x, use_reentrant=False)
    y.sum().backward()
    assert torch.equal(x.grad.cpu(), y.detach().cpu())


def test_a_permutation_by_a_generator(device):
    draw = torch.Generator(device).manual_seed(5)
    assert sorted(torch.randperm(5, device=device, generator=draw).tolist()) == list(range(5))


def test_what_the_accelerator_says_of_memory(device):
    kept = torch.ones(1000, device=device)
    assert torch.accelerator.memory_allocated() >= kept.nbytes
    assert torch.accelerator.max_memory_reserved() >= kept.nbytes
    torch.accelerator.reset_peak_memory_stats()
    assert torch.accelerator.max_memory_allocated() == torch.accelerator.memory_allocated()
