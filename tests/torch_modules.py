"""Modules of PyTorch, one row for each: what `fg.from_torch` is tried with (test_from_torch.py)."""

import torch
from torch import nn
from torch.nn import functional as F

TOKENS = torch.randint(0, 11, (3, 5), generator=torch.Generator().manual_seed(0))


def numbers(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Apply(nn.Module):
    """A function as a module."""

    def __init__(self, fun):
        super().__init__()
        self.fun = fun

    def forward(self, *inputs):
        return self.fun(*inputs)


class Last(nn.Module):
    """What a recurrent net says at the end of a sequence, and its last state."""

    def __init__(self, net, classes=3):
        super().__init__()
        self.net = net
        width = (net.proj_size or net.hidden_size) * (2 if net.bidirectional else 1)
        self.out = nn.Linear(width, classes)

    def forward(self, x):
        if not self.net.batch_first:
            x = x.transpose(0, 1)
        y, state = self.net(x)
        last = y[:, -1] if self.net.batch_first else y[-1]
        state = state[1] if isinstance(state, tuple) else state
        return self.out(last) + state.sum((0, 2))[:, None]


class Steps(nn.Module):
    """A recurrent net with a loop of its own."""

    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def forward(self, x):
        state = x.new_zeros(x.shape[0], self.cell.hidden_size)
        state = (state, state) if isinstance(self.cell, nn.LSTMCell) else state
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
        return state[0] if isinstance(state, tuple) else state


class Words(nn.Module):
    """A language model whose table of words is its output layer too."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 6, padding_idx=0)
        self.net = nn.LSTM(6, 6, num_layers=2, batch_first=True)
        self.out = nn.Linear(6, 11, bias=False)
        self.out.weight = self.table.weight

    def forward(self, tokens):
        return self.out(self.net(self.table(tokens))[0])


class Bag(nn.Module):
    def __init__(self, **how):
        super().__init__()
        self.bag, self.out = nn.EmbeddingBag(11, 6, **how), nn.Linear(6, 2)

    def forward(self, tokens):
        return self.out(self.bag(tokens))


class Padded(nn.Module):
    """A transformer that neither looks at the padding nor counts it."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 8, padding_idx=0)
        self.positions = nn.Parameter(numbers(1, 5, 8))
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.layers, self.out = nn.TransformerEncoder(layer, 2), nn.Linear(8, 3)

    def forward(self, tokens):
        padding = tokens == 0
        x = self.layers(self.table(tokens) + self.positions, src_key_padding_mask=padding)
        words = (~padding).unsqueeze(-1).to(x.dtype)
        return self.out((x * words).sum(1) / words.sum(1).clamp(min=1))


class Attended(nn.Module):
    """A GRU in both directions from a start that is learned, and where to look."""

    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(11, 6), nn.Linear(20, 3)
        self.net = nn.GRU(6, 5, 2, batch_first=True, bidirectional=True)
        self.start, self.look = nn.Parameter(numbers(4, 1, 5)), nn.Linear(10, 1)

    def forward(self, tokens):
        start = self.start.expand(-1, tokens.shape[0], -1).contiguous()
        x, last = self.net(self.words(tokens), start)
        weights = self.look(x).squeeze(-1).masked_fill(tokens == 3, float("-inf")).softmax(1)
        mean = torch.einsum("bt,btd->bd", weights, x)
        return self.out(torch.cat([mean, last[-2], last[-1]], 1))


class Squeezed(nn.Module):
    """Each channel by itself, then all of them, weighted by what the whole image shows."""

    def __init__(self):
        super().__init__()
        self.apart = nn.Conv2d(4, 8, 5, stride=2, padding=2, groups=4, bias=False)
        self.norm, self.mix = nn.GroupNorm(4, 8), nn.Conv2d(8, 6, 1)
        self.less, self.more, self.out = nn.Conv2d(6, 2, 1), nn.Conv2d(2, 6, 1), nn.Linear(6, 3)

    def forward(self, x):
        x = self.mix(F.silu(self.norm(self.apart(x)), inplace=True))
        x = x * self.more(F.relu(self.less(F.adaptive_avg_pool2d(x, 1)))).sigmoid()
        return self.out(F.adaptive_max_pool2d(x, 1).flatten(1))


class Recommender(nn.Module):
    """Whoever and whatever have a row each."""

    def __init__(self):
        super().__init__()
        self.who, self.what, self.both = (
            nn.Embedding(11, 4),
            nn.Embedding(11, 4),
            nn.Bilinear(4, 4, 2),
        )

    def forward(self, who, what):
        a, b = self.who(who), self.what(what)
        return (a * b).sum(-1) + self.both(a, b).mean(-1) + F.cosine_similarity(a, b)


class Residual(nn.Module):
    """Adds in place, as networks for images do."""

    def __init__(self, norm):
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.norm, self.relu = norm, nn.ReLU(inplace=True)
        self.second = nn.Conv2d(4, 4, 3, padding=1, stride=2)
        self.short = nn.Conv2d(4, 4, 1, stride=2)
        self.pool, self.out = nn.AdaptiveAvgPool2d(1), nn.Linear(4, 2)

    def forward(self, x):
        x = self.relu(self.norm(self.first(x)))
        y = self.second(x)
        y += self.short(x)
        return self.out(torch.flatten(self.pool(self.relu(y)), 1))


class Attending(nn.Module):
    """Tokens, a table of positions that is a buffer, and attention that looks back only."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.register_buffer("positions", torch.sin(torch.arange(40.0)).reshape(5, 8))
        self.register_buffer("allowed", torch.ones(5, 5, dtype=torch.bool).tril())
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.out = nn.Linear(8, 3)

    def forward(self, tokens):
        x = self.table(tokens) + self.positions[: tokens.shape[1]]
        x, weights = self.attention(x, x, x, attn_mask=~self.allowed)
        return self.out(x.mean(1)), weights


class Frozen(nn.Module):
    """Its first layer does not train."""

    def __init__(self):
        super().__init__()
        self.first, self.out = nn.Linear(6, 5), nn.Linear(5, 2)
        self.first.requires_grad_(False)

    def forward(self, x):
        return self.out(torch.tanh(self.first(x)))


class Optional(nn.Module):
    """An input that may be left out, between two that may not."""

    def forward(self, x, mask, scale):
        return (x if mask is None else x * mask) * scale


class Two(nn.Module):
    """Two inputs, and a dict as its output."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(7, 2)

    def forward(self, a, b):
        y = self.mix(torch.cat([a, b], 1))
        return {"y": y, "norm": y.norm(dim=1)}


class Target(nn.Module):
    """Follows itself as it is: under no_grad nothing is trained, outside of it the same is."""

    def __init__(self):
        super().__init__()
        self.first, self.out = nn.Linear(6, 5), nn.Linear(5, 2)

    @torch.no_grad()
    def target(self, x):
        return self.first(x).tanh()

    def forward(self, x):
        with torch.no_grad():
            scale = self.out(self.first(x)).abs().mean(1, keepdim=True)
        y = self.first(x)
        return self.out(y) * scale, (y - self.target(x)) ** 2


def batch_norm(features, axes):
    """One that has seen something, in evaluation mode."""
    norm = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d}[axes](features)
    norm.running_mean.copy_(torch.linspace(-1, 1, features))
    norm.running_var.copy_(torch.linspace(0.5, 2, features))
    return norm.eval()


def transformer(**how):
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, **how).eval()


CNN = lambda: nn.Sequential(
    nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 6, 3), nn.ReLU(),
    nn.AvgPool2d(2), nn.Flatten(), nn.Linear(6, 3),
)  # fmt: skip
DOWN_AND_UP = lambda: nn.Sequential(
    nn.Conv2d(2, 4, 3, stride=2, padding=1, groups=2), nn.Dropout2d(0.5), nn.Tanh(),
    nn.ConvTranspose2d(4, 2, 3, stride=2, padding=1, output_padding=1, groups=2),
)  # fmt: skip
MODULES = {
    "MLP": (lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)), numbers(3, 6)),
    "CNN": (CNN, numbers(3, 1, 8, 8)),
    "1-d CNN": (
        lambda: nn.Sequential(nn.Conv1d(2, 4, 3, dilation=2, padding="same"), nn.GELU()),
        numbers(3, 2, 7),
    ),
    "down and up": (lambda: DOWN_AND_UP().eval(), numbers(3, 2, 6, 6)),
    "residual, GroupNorm": (lambda: Residual(nn.GroupNorm(2, 4)), numbers(3, 3, 6, 6)),
    "residual, BatchNorm": (lambda: Residual(batch_norm(4, 2)), numbers(3, 3, 6, 6)),
    "BatchNorm": (
        lambda: nn.Sequential(nn.Linear(6, 4), batch_norm(4, 1), nn.Linear(4, 2)),
        numbers(3, 6),
    ),
    "LayerNorm": (lambda: nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4)), numbers(3, 6)),
    "LSTM": (lambda: Last(nn.LSTM(4, 5, 2, batch_first=True)), numbers(3, 5, 4)),
    "LSTM, time first": (lambda: Last(nn.LSTM(4, 5, bias=False)), numbers(3, 5, 4)),
    "LSTM, projected": (lambda: Last(nn.LSTM(4, 5, 2, proj_size=3)), numbers(3, 5, 4)),
    "LSTM, both ways": (
        lambda: Last(nn.LSTM(4, 5, 2, bidirectional=True, batch_first=True)),
        numbers(3, 5, 4),
    ),
    "GRU": (lambda: Last(nn.GRU(4, 5, 2, batch_first=True)), numbers(3, 5, 4)),
    "GRU, both ways": (lambda: Last(nn.GRU(4, 5, 2, bidirectional=True)), numbers(3, 5, 4)),
    "RNN": (lambda: Last(nn.RNN(4, 5, 2, batch_first=True)), numbers(3, 5, 4)),
    "RNN, relu": (lambda: Last(nn.RNN(4, 5, nonlinearity="relu")), numbers(3, 5, 4)),
    "LSTM cell": (lambda: Steps(nn.LSTMCell(4, 5)), numbers(3, 3, 4)),
    "GRU cell": (lambda: Steps(nn.GRUCell(4, 5)), numbers(3, 3, 4)),
    "RNN cell": (lambda: Steps(nn.RNNCell(4, 5)), numbers(3, 3, 4)),
    "transformer": (transformer, numbers(3, 5, 8)),
    "transformer, norm first": (
        lambda: nn.TransformerEncoder(
            transformer(norm_first=True, activation="gelu"), 2, enable_nested_tensor=False
        ).eval(),
        numbers(3, 5, 8),
    ),
    "attention": (Attending, TOKENS),
    "tied words": (Words, TOKENS),
    "bag of words": (lambda: Bag(padding_idx=0), TOKENS),
    "sum of words": (lambda: Bag(mode="sum"), TOKENS),
    "largest of words": (lambda: Bag(mode="max", padding_idx=0), TOKENS),
    "padded text": (lambda: Padded().eval(), TOKENS * (TOKENS[0, 0] != TOKENS)),
    "GRU, attended": (Attended, TOKENS),
    "depthwise, GroupNorm": (Squeezed, numbers(3, 4, 6, 6)),
    "recommender": (Recommender, (TOKENS[:, 0], TOKENS[:, 1])),
    "weights with lengths": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 3, 2)),
        numbers(3, 4, 6),
    ),
    "frozen": (Frozen, numbers(3, 6)),
    "in place, of the input": (
        lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 2)),
        numbers(3, 6),
    ),
    "two inputs": (Two, (numbers(3, 4), numbers(3, 3))),
}


def module_of(name):
    """The module of a row, in float64, and its example."""
    torch.manual_seed(0)
    make, example = MODULES[name]
    return make().double(), example if isinstance(example, tuple) else (example,)


class Changing(nn.Module):
    """Counts how often it was called."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.out = nn.Linear(6, 2)

    def forward(self, x):
        self.calls += 1
        return self.out(x) * self.calls


class Kept(nn.Module):
    """Keeps its weights small when it is called."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(6, 2)

    def forward(self, x):
        with torch.no_grad():
            self.out.weight.clamp_(-0.1, 0.1)
        return self.out(x)


class Straight(torch.autograd.Function):
    """A sign whose derivative is said to be 1."""

    @staticmethod
    def forward(ctx, x):
        return x.sign()

    @staticmethod
    def backward(ctx, slope):
        return slope


class Whole(nn.Module):
    """Multiplies by a number that is no float32, or another."""

    def __init__(self, many=2**24 + 1):
        super().__init__()
        self.register_buffer("many", torch.tensor([many]))

    def forward(self, x):
        return x * self.many


class Unknown(nn.Module):
    """Two operations that no table has."""

    def forward(self, x):
        x = torch.special.erfcx(x)
        return torch.erfinv(x / 9)


class Noisy(nn.Module):
    """All that draws: dropout of each kind, in recurrent nets and attention, noise."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.net = nn.LSTM(8, 8, 3, dropout=0.5, batch_first=True)
        self.both = nn.GRU(8, 4, 2, dropout=0.5, batch_first=True, bidirectional=True)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True)
        self.apart = nn.Sequential(
            nn.Dropout1d(0.5), nn.AlphaDropout(0.5), nn.FeatureAlphaDropout()
        )
        self.out = nn.Linear(8, 3)

    def forward(self, tokens):
        x, _ = self.both(self.net(self.table(tokens))[0])
        x = self.apart(self.layer(x))
        if self.training:
            x = x + torch.randn_like(x) + torch.rand_like(x)
            x = x + torch.randn(x.shape, dtype=x.dtype) + torch.rand(x.shape, dtype=x.dtype)
        return self.out(x)


# --- operations by themselves ---------------------------------------------------------------------

X, Y = numbers(3, 4, 6), numbers(3, 4, 6).flip(0)
IMAGE = numbers(3, 4, 7, 6)
EACH = """
    abs acos asin atan ceil cos cosh erf exp expm1 floor neg round sigmoid sign sin sinh square
    tan tanh trunc clone
"""
POSITIVE = "log log10 log1p log2 reciprocal rsqrt sqrt"
BENT = """
    gelu leaky_relu relu relu6 hardtanh hardsigmoid hardswish silu mish softplus selu celu elu
    logsigmoid glu softsign tanhshrink
"""


WORD = int(TOKENS[0, 0])
KINKS = torch.tensor([[-6.0, -3, -1, -0.5, 0, 0.5, 1, 3, 6]] * 3, dtype=torch.float64)


def of(room, names, before, x=X, where=""):
    """Functions by their names, each of something that is in its domain."""
    return {
        name + where: (lambda x, name=name: getattr(room, name)(before(x)), x)
        for name in names.split()
    }


def ones(*shape):
    return torch.ones(shape, dtype=torch.float64)


def assigned(x):
    y = x.clone()
    y[:, 0] = 2 * x[:, 1]
    y[:, 1:3] = x[:, 2:] ** 2
    y[:, :, ::2] = 0
    return y


def filled(x):
    y = torch.empty(x.shape[0], 4, 6, dtype=x.dtype)
    for i in range(4):
        y[:, i] = x[:, 3 - i]
    return y


def directions(z):
    """What a complex number is besides its size; without sizes, at 0 too."""
    return z.sgn().real + z.angle() * z.conj().imag + torch.view_as_real(z * z)[..., 0]


ZEROS = torch.tensor([[[0.0, 0, 1, -1], [0, 0, 2, 0]]] * 3, dtype=torch.float64)

FUNCTIONS = {
    **of(torch, EACH, lambda x: x / 3),
    **of(torch, POSITIVE, lambda x: x * x + 0.1),
    **of(F, BENT, lambda x: 3 * x),
    **of(F, BENT.replace("glu ", ""), lambda x: x, KINKS, " at its kinks"),
    **of(torch, "abs sign floor ceil", lambda x: x, KINKS, " at its kinks"),
    "clamp at its kinks": (lambda x: x.clamp(-1, 1) * F.threshold(x, 0.5, -1.0), KINKS),
    "equal ones": (
        lambda x: x.clamp(-1, 1).amax(1) + x.clamp(-1, 1).max(1).values
        + torch.maximum(x, x.abs()).sum(1) + F.max_pool1d(x.clamp(-1, 1), 3).sum(1)
        + F.adaptive_max_pool1d(x.clamp(-1, 1), 2).sum(1)
        + F.adaptive_max_pool2d(x.clamp(-1, 1).reshape(-1, 1, 3, 3), 1).sum((1, 2, 3)),
        KINKS,
    ),
    "no numbers": (
        lambda x: x * torch.isfinite(1 / x) + torch.isinf(x / 0) * 2 + torch.isnan(0 * x / 0), X
    ),
    "gelu, tanh": (lambda x: F.gelu(x, approximate="tanh"), X),
    "prelu": (lambda x: F.prelu(x, torch.arange(4.0, dtype=torch.float64)), X),
    "add": (lambda x, y: torch.add(x, y, alpha=2) + 1, (X, Y)),
    "sub": (lambda x, y: torch.sub(x, y, alpha=2) - 1, (X, Y)),
    "rsub": (lambda x, y: torch.rsub(x, y) * (1 - x), (X, Y)),
    "mul and div": (lambda x, y: x * y / (y * y + 1) * 3 / 2, (X, Y)),
    "rounded div": (
        lambda x, y: torch.div(x, y, rounding_mode="floor") + torch.div(x, y, rounding_mode="trunc")
        + torch.div(x, 0.3, rounding_mode="floor") + x.remainder(0.7) + x.remainder(y),
        (X, Y),
    ),
    "compared": (
        lambda x, y: x * ((x < y) | (x <= 0)) + y * ((x > y) & (x >= 0) ^ (y > 1))
        + (x == y) + (x != y) + (x != 0),
        (X, Y),
    ),
    "compared with numbers": (
        lambda x: x * (x < 0.5) * (x > -0.5) * (x != 1) * (x == x) + (x == 3), X
    ),
    "logical": (
        lambda x, y: x * torch.logical_and(x > 0, y > 0) + y * torch.logical_xor(x > y, y < 0)
        + torch.logical_or(x > 1, y > 1) + torch.logical_not(x > 0) + (x >= y) + (x <= y)
        + ~(x > 0) + torch.bitwise_and(x > 0, y > 0) + torch.bitwise_or(x > 0, y > 0),
        (X, Y),
    ),
    "extremes": (
        lambda x, y: torch.maximum(x, y) * torch.minimum(x, y) + torch.max(x, y) + torch.min(x, y),
        (X, Y),
    ),
    "clamp": (
        lambda x, y: x.clamp(-0.5, 0.7) * x.clamp_min(0.1) * x.clamp_max(0.3) + x.clamp_min(y)
        + x.clamp(y - 1, y + 1),
        (X, Y),
    ),
    "powers": (
        lambda x: x**2 + x**3.0 + (x * x + 1) ** 0.5 + (x * x + 1) ** x + 2**x, X
    ),
    "where": (
        lambda x, y: torch.where(x > y, x, y) + torch.where(x > 0, x, 1.0)
        + torch.where(x > 0, 2.0, y) + torch.where(x > 0, 0.0, 1.0) + x.masked_fill(y > 0, 3.0)
        + x.masked_fill(y > 0, torch.tensor(2.0, dtype=torch.float64)),
        (X, Y),
    ),
    "casts": (
        lambda x, t: x.float().double() + x.to(torch.float32).type_as(x) + t.double()[:, :, None]
        + (t / 2)[:, :, None] + t[:, :, None] * x.detach(),
        (numbers(3, 5, 1), TOKENS),
    ),
    "sums": (
        lambda x: x.sum((1, 2)) + x.mean((1, 2)) + x.mean(2).sum(1) + x.prod(2).sum(1)
        + x.amax((1, 2)) + x.amin((1, 2)) + x.sum() + x.mean() + x.max() + x.min() + x[:1].prod(),
        X,
    ),
    "spread": (
        lambda x: x.var(2) + x.std(2) + x.var() * x.std() + (0 * x).std(2)
        + x.std(1, correction=0).sum(1, keepdim=True) * x.var(1, correction=0).sum(1, keepdim=True),
        X,
    ),
    "extreme places": (
        lambda x: x.max(2).values * x.min(2, keepdim=True).values.squeeze(2) + x.argmax(2)
        - x.argmin(2) + x.max(2).indices,
        X,
    ),
    "any and all": (
        lambda x: x.sum((1, 2)) * (x > 0).any(2).all(1) + (x > 9).any() + (x < 9).all(), X
    ),
    "softmax": (
        lambda x: x.softmax(-1) * x.log_softmax(1) + torch.softmax(x, 2, dtype=torch.float64), X
    ),
    "log-sum-exp": (lambda x: x.logsumexp(2) + x.cumsum(1)[:, :, 0], X),
    "norms": (
        lambda x: F.normalize(x, dim=2).sum((1, 2)) + torch.linalg.vector_norm(x, 3, dim=(1, 2))
        + torch.linalg.vector_norm(0 * x, dim=(1, 2)) + torch.linalg.vector_norm(0 * x, 3, (1, 2))
        + x.norm(1, (1, 2)) + x.norm(1.5, (1, 2)) * x.norm(0.0, (1, 2))
        + x.flatten(1).norm(float("inf"), 1) * x.flatten(1).norm(float("-inf"), 1),
        X,
    ),
    "complex numbers": (
        lambda x, y: (torch.complex(x, y) * (2 + 1j)).abs() + directions(torch.complex(x, y))
        + torch.view_as_complex(torch.stack([x, y], 3)).exp().imag
        + (torch.complex(x, y) @ torch.complex(y, x).mH).abs().sum(2, keepdim=True)
        + (torch.ones(6, dtype=torch.complex128) * 1j * x).imag + x.angle() + x.sgn(),
        (X, Y),
    ),
    "complex zeros": (
        lambda x: torch.complex(x, x.flip(1)).abs() + directions(torch.complex(x, x.flip(1)))
        + torch.linalg.vector_norm(torch.complex(x, 0 * x), dim=2, keepdim=True)
        + torch.linalg.vector_norm(torch.complex(0 * x, 0 * x), 3, dim=2, keepdim=True),
        ZEROS,
    ),
    **{
        f"norm of complex numbers, {order}": (
            lambda x, y, order=order: torch.linalg.vector_norm(torch.complex(x, y), order, dim=2)
            + x.sum(2),
            (X, Y),
        )
        for order in (0, 1, 2, 3, float("inf"), float("-inf"))
    },
    "sizes of complex numbers": (
        lambda x, y: F.l1_loss(torch.complex(x, y), torch.complex(y, x))
        + F.pairwise_distance(torch.complex(x, y), torch.complex(y, x))
        + F.normalize(torch.complex(x, y), dim=2).imag.sum(2)
        + torch.vdot(torch.complex(x, y)[0, 0], torch.complex(y, x)[0, 1]).imag
        + torch.complex(x, y).var(2),
        (X, Y),
    ),
    "small ones are alike": (lambda x, y: F.cosine_similarity(1e-9 * x, y, 2), (X, Y)),
    "functions of whole numbers": (
        lambda t, x: x * (t.sigmoid() + t.tanh() + t.sqrt() + t.exp() + t.erf() + t.log1p())
        + (t * 300000007) % 2.5 + 7 % (t + 1),
        (TOKENS, numbers(3, 5)),
    ),
    "norm of each": (
        lambda x: F.layer_norm(x, (4, 6)) + F.rms_norm(x, (6,)) + F.instance_norm(x), X
    ),
    "views": (
        lambda x: x.view(x.shape[0], -1).reshape(-1, 24).unflatten(1, (6, 4)).transpose(1, 2)
        + x.flatten(1)[:, None, :6]
        + x.permute(0, 2, 1).mT.contiguous() + x[0].t().t()[None].expand(x.shape[0], -1, -1),
        X,
    ),
    "ones": (
        lambda x: x.unsqueeze(1).squeeze(1) + x[:, :, None].squeeze((2, 1))
        + x[:, 0][:, None].squeeze()[:, None],
        X,
    ),
    "joined": (
        lambda x, y: torch.cat([x, y], 2) + torch.stack([x, y], 3).flatten(2), (X, Y)
    ),
    "parts": (
        lambda x: x.split(4, 2)[1] * x.split([1, 2, 3], 2)[1]
        + x.chunk(3, 2)[2] * x.unbind(2)[3][..., None] 
        + x.narrow(2, 1, 2) + x[:, ::2].repeat(1, 2, 1)[:, :, -2:],
        X,
    ),
    "chosen": (
        lambda x, t: x[:, torch.tensor([1, 0, 3])] + x[:, :3].flip(1).roll(1, 2)
        + x.index_select(1, torch.tensor([2, 2, 0]))
        + x[:, :3].gather(2, t[:, :3, None].expand(-1, -1, 6) % 6)
        + x.gather(2, t[:, :1, None] % 6) * x.gather(1, t[:, :3, None] % 4),
        (X, TOKENS),
    ),
    "chosen from more": (
        lambda x, t: x.gather(1, t[:2] % 6)[:, None] + x.gather(0, t[:1] % 2),
        (numbers(3, 6), TOKENS),
    ),
    "repeated": (lambda x: x.repeat(1, 2, 1) + x.repeat_interleave(2, 1), X),
    "rolled": (lambda x: x.roll((1, 2), (1, 2)) + x.roll(0, 1), X),
    "padded": (
        lambda x: F.pad(x, (1, -2), value=2.0) + F.pad(x, (0, 1), mode="reflect")[..., :5]
        + F.pad(x, (1, 0), mode="replicate")[..., :5],
        X,
    ),
    "padded images": (
        lambda x: F.pad(x, (1, 2, 0, 1), mode="reflect") + F.pad(x, (1, 2, 0, 1), mode="replicate")
        + F.pad(x, (1, 2, 0, 1)) + F.pad(x, (1, 2, 0, 1), mode="circular"),
        IMAGE,
    ),
    "larger images": (
        lambda x: F.pixel_shuffle(x, 2) + F.interpolate(x, scale_factor=2)[:, :1]
        + F.interpolate(x, size=(14, 12))[:, 1:2],
        IMAGE,
    ),
    "longer": (
        lambda x: F.interpolate(x, scale_factor=1.5)[:, 0]
        + F.interpolate(x, scale_factor=1.7)[:, 1, :9] + F.interpolate(x, size=9)[:, 2], X
    ),
    "longer, between": (
        lambda x: F.interpolate(x, scale_factor=1.7, mode="linear")[..., :3]
        + F.interpolate(x, size=3, mode="linear", align_corners=True)
        + F.interpolate(x, size=1, mode="linear", align_corners=True), X
    ),
    "larger images, between": (
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear")
        + F.interpolate(x, size=(14, 12), mode="bilinear", align_corners=True)
        + F.interpolate(x, size=(3, 4), mode="bilinear").sum((2, 3), keepdim=True), IMAGE
    ),
    "nearest of three axes": (
        lambda x: F.interpolate(x, scale_factor=1.7), numbers(3, 1, 2, 3, 4)
    ),
    "pixels as channels": (lambda x: F.pixel_unshuffle(x[..., :6, :], 2), IMAGE),
    "mixed": (
        lambda x, y: torch.addcmul(x, x, y, value=2) + torch.addcdiv(x, x, y * y + 1, value=0.5)
        + torch.lerp(x, y, 0.3) + torch.lerp(x, y, x.sigmoid()) + torch.atan2(x, y * y + 1)
        + torch.logaddexp(x, y),
        (X, Y),
    ),
    "distances": (
        lambda x, y: F.cosine_similarity(x, y, 2) + F.pairwise_distance(x, y)
        + F.cosine_similarity(0 * x, y, 2) + torch.vdot(x[0, 0], x[0, 1])
        + F.bilinear(x, y, ones(4, 6, 6)).sum(2),
        (X, Y),
    ),
    "in order": (
        lambda x: x.sort(1).values * x.sort(1, descending=True).values
        + x.topk(2, 1).values.sum(1, True) * x.topk(2, 2, largest=False).values.sum(2, True)
        + x.argsort(2, descending=True) + x.topk(6, 2).indices,
        X,
    ),
    "one of many": (
        lambda t, x: x * F.one_hot(t, 11) * torch.linspace(0, 1, 11, dtype=torch.float64)
        + (t // 3)[..., None] + torch.eye(5, 11, dtype=torch.float64)[:, :1]
        + torch.eye(11, dtype=torch.float64)[:5].tile(1, 2)[:, 11:],
        (TOKENS, numbers(3, 5, 11)),
    ),
    "assigned": (assigned, X),
    "no infinities": (lambda x: (x / (x > 0)).nan_to_num(1.0, 2.0, 3.0) + x.nan_to_num(), X),
    "made": (
        lambda x: x + torch.arange(6) * torch.arange(1, 7) + torch.arange(0, 12, 2) + torch.zeros(6)
        + torch.ones(6) + torch.full((6,), 2.0) + x.new_zeros(6) + x.new_ones(6)
        + x.new_full((6,), 3) + torch.zeros_like(x) + torch.ones_like(x) + torch.full_like(x, 2)
        + torch.tensor([1.0] * 6) + torch.scalar_tensor(2.0),
        X,
    ),
    "triangles": (lambda x: x.tril() * 2 + x.triu(1) + torch.ones(4, 6).tril(-1), X),
    "products": (
        lambda x, y: x @ y.mT + torch.bmm(x, y.mT) + torch.baddbmm(x[:, :, :4], x, y.mT, alpha=2)
        + torch.einsum("bij,bkj->bik", x, y) + x[:, :4, :4],
        (X, Y),
    ),
    "products of matrices": (
        lambda x: torch.mm(x, x[:2].t()) @ x[:2] + torch.addmm(x[0], x, x.t() @ x, beta=2)
        + torch.mv(x, x[0])[:, None] + torch.dot(x[0], x[1]) + torch.outer(x[0], x[1]).sum(),
        numbers(3, 6),
    ),
    "largest of windows": (
        lambda x: F.max_pool2d(x, 3, 2, 1)[..., :3, :3]
        + F.max_pool2d(x, 2, 2, ceil_mode=True)[..., :3, :3]
        + F.max_pool2d(x, 2, 1, dilation=2)[..., :3, :3] + F.adaptive_max_pool2d(x, 3),
        IMAGE,
    ),
    "mean of windows": (
        lambda x: F.avg_pool2d(x, 3, 2, 1)[..., :3, :3]
        + F.avg_pool2d(x, (2, 3), 2, ceil_mode=True)[..., :3, :3]
        + F.avg_pool2d(x, 3, 2, 1, count_include_pad=False)[..., :3, :3]
        + F.avg_pool2d(x, 2, divisor_override=3)[..., :3, :3]
        + F.adaptive_avg_pool2d(x, (3, None))[..., :3],
        IMAGE,
    ),
    "pools of one axis": (
        lambda x: F.max_pool1d(x, 2) + F.avg_pool1d(x, 2) + F.adaptive_avg_pool1d(x, 3)
        + F.adaptive_max_pool1d(x, 3),
        X,
    ),
    "pools of three axes": (
        lambda x: F.max_pool3d(x, 2) + F.avg_pool3d(x, 2) + F.adaptive_avg_pool3d(x, (2, 3, 3))
        + F.adaptive_max_pool3d(x, (2, 3, 3)),
        numbers(3, 1, 4, 6, 6),
    ),
    "convolutions of three axes": (
        lambda x: F.conv3d(x, ones(2, 1, 2, 2, 2), padding="valid").sum((2, 3, 4))
        + F.conv3d(x, ones(2, 1, 2, 2, 2), stride=2, padding=1).sum((2, 3, 4))
        + F.conv_transpose3d(x, ones(1, 2, 2, 2, 2), stride=2).sum((2, 3, 4)),
        numbers(3, 1, 3, 4, 4),
    ),
    "convolutions of one axis": (
        lambda x: F.conv_transpose1d(x, ones(4, 2, 3), stride=2, dilation=2)
        + F.conv1d(x, ones(2, 4, 1)).sum((1, 2))[:, None, None],
        X,
    ),
    "convolutions with names": (
        lambda x: F.conv2d(x, ones(2, 4, 2, 3), padding="same", dilation=2)
        + F.conv2d(x, ones(2, 4, 1, 1), padding="valid")
        + F.conv2d(x[0], ones(2, 4, 1, 1)),
        IMAGE,
    ),
    "attention": (
        lambda x: F.scaled_dot_product_attention(x, 2 * x, x + 1, is_causal=True)
        + F.scaled_dot_product_attention(x, x, x, scale=0.3)
        + F.scaled_dot_product_attention(x, x, x, torch.arange(36).reshape(6, 6) % 2 == 0)
        + F.scaled_dot_product_attention(x, x, x, torch.arange(36).reshape(6, 6) > 12),
        IMAGE[..., :6, :],
    ),
    "grouped attention": (
        lambda x: F.scaled_dot_product_attention(x, x[:, :2], x[:, :2], enable_gqa=True), IMAGE
    ),
    "losses of classes": (
        lambda x, t: F.cross_entropy(x, t[:, 0] % 6, reduction="none")
        + F.cross_entropy(x, t[:, 0] % 6, x[0].abs().detach(), ignore_index=WORD % 6)
        + F.cross_entropy(x, t[:, 1] % 6, x[0].exp().detach(), label_smoothing=0.1)
        + F.cross_entropy(x, x.softmax(1)) + F.nll_loss(x, t[:, 2] % 6, reduction="sum")
        + F.cross_entropy(x.unflatten(1, (3, 2)), t[:, :2] % 3, ignore_index=1),
        (numbers(3, 6), TOKENS),
    ),
    "losses of numbers": (
        lambda x, y: F.mse_loss(x, y) + F.mse_loss(x, y, reduction="none").sum((1, 2))
        + F.l1_loss(x, y) + F.smooth_l1_loss(x, y, beta=0.5) + F.smooth_l1_loss(x, y, beta=0.0)
        + F.huber_loss(x, y, reduction="sum", delta=0.7)
        + F.kl_div(x.log_softmax(2), y.softmax(2), reduction="batchmean")
        + F.kl_div(x.log_softmax(2), y.detach().relu(), reduction="sum")
        + torch.xlogy(0 * x.detach(), 1 / (0 * y.detach().abs())).sum(),
        (X, Y),
    ),
    "losses of logits": (
        lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid(), y.exp().detach())
        + F.binary_cross_entropy_with_logits(x, y.sigmoid(), pos_weight=x[0, 0].exp().detach())
        + F.binary_cross_entropy_with_logits(40 * x, y.sigmoid(), reduction="none"),
        (X, Y),
    ),
    "written with others": (
        lambda x: x.clip(-1, 1) + torch.hstack([x[:, :2], x[:, 2:]])
        + x.diff(dim=2, prepend=x[..., :1])
        + torch.meshgrid(torch.arange(4.0), torch.arange(6.0), indexing="ij")[0]
        + torch.tensordot(x, x[0].mT @ x[0], 1) + filled(x),
        X,
    ),
    "weighted bags": (
        lambda t, w: F.embedding_bag(t, w[0], mode="sum", per_sample_weights=w[:, 0, :5]),
        (TOKENS, numbers(3, 11, 6)),
    ),
    "relu of an RNN cell": (
        lambda x: torch.rnn_relu_cell(x, x[:, :2], ones(2, 6), ones(2, 2)),
        numbers(3, 6),
    ),
}  # fmt: skip


# --- whole numbers --------------------------------------------------------------------------------

BIG = torch.tensor(
    [[2**31 - 1, -(2**31), 1 - 2**31, 2**30 + 1], [16777217, -16777219, 7, -7],
     [123456789, -1, 0, -987654321]]
)  # fmt: skip
BY = torch.tensor([[3, -3, 7, -1], [1, 1000003, -16777217, 2], [-2, 2**31 - 1, 5, -5]])


def fnv(a):
    """A hash of all tokens of an example."""
    h = 0 * a[:, 0] - 3750763034362895579
    for i in range(a.shape[1]):
        h = (h ^ a[:, i]) * 1099511628211
    return h


# Functions of two tensors of whole numbers, of which the second has no zero.
WHOLE = {
    "divided": lambda a, b: (
        torch.div(a, b, rounding_mode="trunc"), torch.div(a, b, rounding_mode="floor"), a // b,
        a // 3, torch.div(a, 3, rounding_mode="trunc"), a % b, a % 7, 7 % b, torch.fmod(a, b),
        torch.fmod(a, 7), a / b, a / 3, a.float().mean(1), a % 2.5,
    ),
    "arithmetic": lambda a, b: (a + b, a + 1, a - b, 1 - a, a * b, a * 31, a**2, a**3, -a, a.abs(),
                                a.square(), a.sign()),
    "sums": lambda a, b: (a.sum(1), a.cumsum(1), a.prod(1), a.sum(1, dtype=torch.int32),
                          (a > b).sum(1), (a > b).cumsum(1), (a > b) * 3),
    "bits": lambda a, b: (a & b, a | b, a ^ b, ~a, a & 21, a | 1, a ^ 21, a << 3, a >> 3, a << -1,
                          a << b % 9, a >> b % 70),
    "chosen": lambda a, b: (a.clamp(3, 100), torch.maximum(a, b), torch.where(a > b, a, 7), a < b,
                            a.amax(1), a.argmax(1), a.sort(1).values, a.to(torch.int8), a.half()),
}  # fmt: skip

# More, of which the products have more than 32 bits.
HASHES = {
    "products": lambda a, b: (a * b, a * 2654435761, a * b * (a + b), a + 2**40, a**5, (a * b) ** 0,
                              -(a * b), (a * b).abs(), (a * b).sign()),
    "fnv": lambda a, b: (fnv(a), fnv(a) % 1000003),
    "finalizer": lambda a, b: (
        lambda h: (h ^ (h >> 33)) * -49064778989728563)(a * -4417276706812531889),
    "shifted": lambda a, b: (*((a * b) << n for n in (0, 1, 31, 32, 33, 63, 64, -1)),
                             *((a * b) >> n for n in (0, 1, 31, 32, 33, 63, 64, -1)),
                             (a * b) << b % 70, (a * b) >> b % 70),
    "bits": lambda a, b: ((a * b) & a, (a * b) | b, a ^ (b * 3), ~(a * b), (a * b) & 0xFFFFFFFF,
                          (a * b) & 255, a ^ 0x5BD1E9955BD1E995),
    "divided": lambda a, b: ((a * b) // 7, (a * b) // -7, (a * a) // b, (a * a * 3) // (b * 5),
                             torch.div(a * b, b * 3, rounding_mode="trunc"), a // -1, a // 2**40,
                             a / (b * b), (a * b) / 3),
    "remainders": lambda a, b: ((a * b) % 7, (a * b) % -7, (a * a * 3) % (b * 5), a % 2**40,
                                torch.fmod(a * b, b * 3), torch.fmod(a * b, 1000003)),
    "sums": lambda a, b: ((a * b).sum(1, keepdim=True), (a * b).cumsum(1), (a * b).prod(1),
                          (a * b).sum((0, 1)), (a * b).sum(1, dtype=torch.int32)),
    "chosen": lambda a, b: (torch.where(a > b, a * b, b), (a * b).masked_fill(a > b, 2**40),
                            (a * b).clamp(-(2**40), 2**40), (a * b).clamp(-5, 5),
                            (a * b).clamp_max(3), torch.maximum(a * b, b), torch.minimum(a * b, b)),
    "compared": lambda a, b: (a * b < b, a * b >= b * b, a * b == b, a * b != a * b, a * b > 2**40,
                              a < 2**40, a * b > 2.5, a * b <= b.float(), (a * b).any(1),
                              torch.logical_and(a * b, b)),
    "floats": lambda a, b: ((a * b).float(), a * b * 1.5, (a * 0 - 5).float(), (a * b).sqrt(),
                            (a + b).sigmoid(), (1e3 * a.float()).long(), (a.float() / 8).long()),
    "moved": lambda a, b: ((a * b)[:, 1:3], (a * b)[:, 0], torch.cat([a * b, a], 1), (a * b).mT,
                           torch.stack([a * b, b]), (a * b)[:, None].expand(-1, 3, -1),
                           (a * b).gather(1, (b + 1) % 4), (a * b)[:, [0, 2]],
                           (a * b).split(2, 1)[1], (a * b).flatten(1).repeat(1, 2),
                           torch.zeros_like(a * b), (a * b).view(a.shape[0], 2, 2)),
}  # fmt: skip

# Places that are computed, in an example of one column of tokens for each function.
TABLE = torch.arange(500.0)[:, None]
AT_PLACES = {
    "shifted tokens": lambda t: F.embedding(t + 1, TABLE),
    "two columns as one": lambda t: F.embedding(t[:, 0] * 11 + t[:, 1], TABLE),
    "hashed tokens": lambda t: F.embedding((t * 2654435761 + 12345) % 499, TABLE),
    "places of words": lambda t: F.embedding(((t != 0).cumsum(1) - 1).clamp(min=0), TABLE),
    "last word": lambda t: TABLE[(t != 0).sum(1) - 1],
    "places": lambda t: F.embedding(torch.arange(5) + 1, TABLE) + t[..., None],
    "classes": lambda t: F.cross_entropy(
        F.one_hot((t * 5 + 1) % 11, 11).float()[:, 0], t[:, 1] * 1
    ),
}

# --- halves ---------------------------------------------------------------------------------------

HALVES = {
    "layer_norm": (lambda x: F.layer_norm(x, (50,)), 300),
    "group_norm": (lambda x: F.group_norm(x[:, None, :], 1), 300),
    "instance_norm": (lambda x: F.instance_norm(x[:, None, :]), 300),
    "rms_norm": (lambda x: F.rms_norm(x, (50,)), 300),
    "rms_norm of small ones": (lambda x: F.rms_norm(x, (50,)), 1e-3),
    "norms": (lambda x: x.norm(dim=1) + torch.linalg.vector_norm(x, 3, dim=1), 300),
    "norm, as float32": (lambda x: torch.linalg.vector_norm(x, dim=1, dtype=torch.float32), 300),
    "normalize": (lambda x: F.normalize(x, dim=1), 300),
    "cosine_similarity": (lambda x: F.cosine_similarity(x, x.flip(1), 1), 300),
    "avg_pool1d": (lambda x: F.avg_pool1d(x.abs()[:, None, :], 50), 9000),
    "sums": (lambda x: x.abs().cumsum(1)[:, -1] + x.abs().mean(1) + x.std(1), 300),
    "interpolate": (lambda x: F.interpolate(x[:, None, :], size=4097, mode="linear"), 1),
    "gelu and softplus": (lambda x: F.gelu(x) + F.softplus(x) + F.mish(x) + F.logsigmoid(x), 9),
    "attention": (lambda x: F.scaled_dot_product_attention(*[x.view(-1, 5, 10)] * 3), 20),
    "losses": (lambda x: F.mse_loss(x, -x) / 9 + F.huber_loss(x, -x, delta=400.0) / 9, 100),
}
