"""Training loops end with the losses and weights of the host; the run of OpInfos has the backward of each operator."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

STEPS = 3


def data(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def classes(count, kinds, seed=2):
    return torch.randint(kinds, (count,), generator=torch.Generator().manual_seed(seed))


class Last(nn.Module):
    """A recurrent network and a head on its last output."""

    def __init__(self):
        super().__init__()
        self.inner = nn.LSTM(5, 6, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.inner(x)[0][:, -1])


class Language(nn.Module):
    """Embedding, a transformer layer under a causal mask, a head that is tied to the embedding."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1]).to(tokens.device)
        return self.head(self.layer(self.embedding(tokens), src_mask=mask, is_causal=True))


def supervised(model, x, y, loss):
    """A loop over one batch."""

    def run(device):
        torch.manual_seed(0)
        net = model().to(device)
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        given, target = x.to(device), y.to(device)
        losses = []
        for _ in range(STEPS):
            optimizer.zero_grad()
            value = loss(net(given), target)
            value.backward()
            optimizer.step()
            losses.append(value.item())
        return losses, net

    return run


def gan(device):
    torch.manual_seed(0)
    maker, judge = nn.Linear(4, 6).to(device), nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 1)).to(device)
    one, two = torch.optim.Adam(maker.parameters(), 0.01), torch.optim.Adam(judge.parameters(), 0.01)
    real, noise = data(8, 6).to(device), data(8, 4, seed=3).to(device)
    yes, no = torch.ones(8, 1, device=device), torch.zeros(8, 1, device=device)
    losses = []
    for _ in range(STEPS):
        two.zero_grad()
        judged = F.binary_cross_entropy_with_logits(judge(real), yes)
        judged = judged + F.binary_cross_entropy_with_logits(judge(maker(noise).detach()), no)
        judged.backward()
        two.step()
        one.zero_grad()
        made = F.binary_cross_entropy_with_logits(judge(maker(noise)), yes)
        made.backward()
        one.step()
        losses += [judged.item(), made.item()]
    return losses, nn.ModuleList([maker, judge])


def amp(device):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3)).to(device)
    optimizer, scaler = torch.optim.SGD(net.parameters(), 0.1), torch.amp.GradScaler("sim", enabled=device != "cpu")
    x, y = data(8, 6).to(device), classes(8, 3).to(device)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
            loss = F.cross_entropy(net(x).float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return losses, net


def clipped(device):
    torch.manual_seed(0)
    net = nn.Linear(6, 3).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    x, y = data(8, 6).to(device), classes(8, 3).to(device)
    losses = []
    for _ in range(STEPS):
        for part in range(2):  # gradients of two halves
            loss = F.cross_entropy(net(x[part::2]), y[part::2]) / 2
            loss.backward()
            losses.append(loss.item())
        losses.append(nn.utils.clip_grad_norm_(net.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        scheduler.step()
    return losses, net


def second_order(device):
    """One step of a learner inside the loss of another."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.ones(4, device=device))
    optimizer = torch.optim.SGD([weight], 0.1)
    x, y = data(8, 4).to(device), data(8, seed=5).to(device)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        inner = ((x @ weight - y) ** 2).mean()
        (slope,) = torch.autograd.grad(inner, weight, create_graph=True)
        outer = ((x @ (weight - 0.1 * slope) - y) ** 2).mean()
        outer.backward()
        optimizer.step()
        losses.append(outer.item())
    return losses, nn.ParameterList([weight])


def tokens(logits, target):
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


TOKENS = classes(24, 11).view(4, 6)

LOOPS = {
    "cnn": supervised(
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3)),
        data(4, 3, 8, 8), classes(4, 3), F.cross_entropy,
    ),
    "lstm": supervised(Last, data(4, 7, 5), classes(4, 3), F.cross_entropy),
    "amp": amp,
    "transformer": supervised(Language, TOKENS, TOKENS.roll(-1, 1), tokens),
    "gan": gan,
    "accumulated and clipped": clipped,
    "second order": second_order,
}  # fmt: skip
IN_CI = ("cnn", "lstm", "amp")
SLOW = pytest.mark.slow


@pytest.mark.filterwarnings("ignore:.*aot_autograd.*")
@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in IN_CI else SLOW) for name in LOOPS])
def test_a_training_loop_ends_as_on_the_host(sim, name):
    sim(strategy="lazy" if name in IN_CI else "program")
    expected, here = LOOPS[name]("cpu")
    losses, there = LOOPS[name]("sim")
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if name == "amp" else {"rtol": 1e-3, "atol": 1e-4}
    assert losses == pytest.approx(expected, rel=tolerance["rtol"], abs=tolerance["atol"])
    assert len(set(losses)) > 1  # it learnt something
    for one, other in zip(here.parameters(), there.parameters(), strict=True):
        assert other.device.type == "sim"
        torch.testing.assert_close(other.detach().cpu(), one.detach(), **tolerance)
