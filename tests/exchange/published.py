"""Records from plain lists of texts, for tests of the exchange. A token is two bytes, the last one whatever is left."""

import numpy as np

from mutualrl import experience, types
from mutualrl.experience import Header, WireShape
from mutualrl.settings import ExchangeConfig, PolicyConfig, RunConfig
from mutualrl.types import Problem, Rollouts, Trace, Verdicts

SHAPE = WireShape(P=3, G=4, U=32, T=8, A=6)
IDS = ("p/0", "p/1", "p/2")
# Two-byte tokens that cut characters, an empty reply (the stop id only), one that was cut off, a long one.
TEXTS = (("12", "a b=c", "", "né ö"), ("7", "日本", "so: 4", "x"), ("0123456789abcdef", " ", "\n", "zz"))
CUT_OFF = (1, 2)  # the row that ended by its length
REWARD = np.array([[1.0, 0, 0, 0.5], [0, 0, 0, 0], [1, 1, 1, np.nan]])
SUCCESS = np.array([[1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, -1]], np.int8)
ANSWERS = (("12", None, None, "é"), ("7", "日本", "4", ""), (None, None, None, "zz"))


def spans_of(texts, finish, *, seed=0):
    """Trace [P, G] of texts (str or bytes), tokens of two bytes."""
    raw = [[x if isinstance(x, bytes) else x.encode() for x in row] for row in texts]
    p, g = len(raw), len(raw[0])
    u = max(len(x) for row in raw for x in row)
    q = (u + 1) // 2 + 1
    text, ends = np.zeros((p, g, u), np.uint8), np.zeros((p, g, q), np.int32)
    n = np.zeros((p, g), np.int32)
    for i, row in enumerate(raw):
        for j, x in enumerate(row):
            text[i, j, : len(x)] = list(x)
            n[i, j] = (len(x) + 1) // 2
            ends[i, j] = np.minimum(2 * np.arange(1, q + 1), len(x))
    rng = np.random.default_rng(seed)
    logp = np.where(np.arange(q) < n[..., None], -rng.exponential(1.0, (p, g, q)), 0).astype(np.float32)
    eos = np.where(finish == types.STOP, -rng.exponential(1.0, (p, g)), np.nan).astype(np.float32)
    bytes_ = np.array([[len(x) for x in row] for row in raw], np.int32)
    return Trace(text, bytes_, ends, n, logp, eos, np.ones((p, g), bool))


def rollouts(policy, texts, *, ids=IDS, step=0, version=5, finish=None, temperature=1.0):
    """Rollouts with these texts; token ids and prompts are made up, nobody reads them here."""
    p, g = len(texts), len(texts[0])
    if finish is None:
        finish = np.zeros((p, g), np.int8)
    nothing = np.zeros((p, g, 2), np.int32)
    return Rollouts(
        policy=policy,
        version=version,
        step=step,
        problems=tuple(Problem(id=x, question="?") for x in ids),
        prompt=np.zeros((p, 1), np.int32),
        prompt_positions=np.zeros((p, 1), np.int32),
        tokens=nothing,
        mask=nothing > 0,
        logprobs=nothing.astype(np.float32),
        finish=finish,
        text=texts,
        temperature=temperature,
    )


def finished(texts):
    """i8[P, G]: all stopped by themselves, but for the row that was cut off."""
    out = np.full((len(texts), len(texts[0])), types.STOP, np.int8)
    if len(texts) > CUT_OFF[0] and len(texts[0]) > CUT_OFF[1]:
        out[CUT_OFF] = types.LENGTH
    return out


def head(policy="a", *, step=0, ids=IDS, version=5, run="run", label="verifier"):
    return Header(run, step, policy, version, label, tuple(ids))


def record(
    policy="a", texts=TEXTS, *, step=0, ids=IDS, reward=REWARD, success=SUCCESS, answers=ANSWERS, traced=True,
    shape=SHAPE, seed=0, run="run", label="verifier",
):  # fmt: skip
    """(the RolloutRecord of these texts, rows that do not fit)."""
    finish = finished(texts)
    p, g = finish.shape
    return experience.rollout_record(
        head(policy, step=step, ids=ids, run=run, label=label),
        rollouts(policy, texts, ids=ids, step=step, finish=finish),
        spans_of(texts, finish, seed=seed),
        np.zeros((p, g), np.int8),
        Verdicts(reward[:p, :g], success[:p, :g]),
        shape,
        with_trace=traced,
        answers=None if answers is None else [row[:g] for row in answers[:p]],
    )


def run_of(names="ab", *, frozen="", label="verifier", **exchange):
    """Settings of a run whose wire has the sizes of SHAPE but for A."""
    return RunConfig(
        policies={
            n: PolicyConfig(model="m", frozen=n in frozen, group_size=SHAPE.G, max_new_tokens=SHAPE.T) for n in names
        },
        data={"name": "procedural"},
        problems_per_step=SHAPE.P,
        label={"name": label},
        exchange=ExchangeConfig(max_text_bytes=SHAPE.U, **exchange),
    )


def fields(record):
    """Every array of a record by name."""
    body = record.stats if isinstance(record, experience.StatsRecord) else record
    return {k: v for k, v in vars(body).items() if k != "header" and v is not None}


def assert_same(a, b):
    """Two records are the same, bit for bit."""
    assert type(a) is type(b) and a.header == b.header
    assert fields(a).keys() == fields(b).keys()
    for name, x in fields(a).items():
        y = fields(b)[name]
        assert np.asarray(x).dtype == np.asarray(y).dtype and np.shape(x) == np.shape(y), name
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes(), name
