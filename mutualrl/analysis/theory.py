"""What theory says of labels and transfer on the smallest problem there is: a right answer and a wrong one.

    python -m mutualrl.analysis.theory [--K=8] [--out=theory] [--run=RUN_FOLDER ...]

draws the phase plane of two policies, the drifts and the rescue times, next to the evaluations of real runs. It writes
`theory.html`, one page that needs nothing else, and `theory.json`; `--out` is what their names begin with, and `--run`
may be repeated.

The model: a policy answers right with probability p, z = logit p is its one parameter, and C ~ Bin(K, p) of the K
samples of a group are right. Advantages are group-relative with the population standard deviation, nothing is clipped,
and z follows the gradient at rate eta, so times are in units of 1/eta. All formulas are our own derivations within this
model; the questions and some properties are published: votes of a peer as labels by Co-RL, the rescue by successes of
peers (SGT) and pooled peer rollouts (PRP) as ideas. One wrong answer only: what needs several, or several tokens, this
model cannot show.

Functions take probabilities of any shape and broadcast. A *speed* is dz/dt at eta = 1; dp/dt = eta p (1 - p) speed.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags
from scipy.integrate import quad_vec, solve_ivp
from scipy.special import binom, expit, logit

from mutualrl.analysis.runs import Run, open_runs
from mutualrl.analysis.theory_runs import of_run
from mutualrl.files import replace_text
from mutualrl.settings import ConfigError

HALVES = ((0.9, 0.2), (0.2, 0.9))  # complementary expertise: each policy is good where the other is not
RESCUE_STARTS = (1e-2, 1e-3, 1e-4, 1e-6)
PEER = 0.5  # success of the peer in the rescue times
LAMBDAS = (0.1, 0.01)  # imitation weights of SGT
MOST = 256  # samples a group in the command; above about 1000 binomial coefficients overflow

Speed = Callable[[np.ndarray], np.ndarray]


# ---- One group


def g(p: np.ndarray, K: int) -> np.ndarray:
    """Speed under labels that are right: E[sqrt(C(K - C))] / K (our derivation). f64[...], in [0, 1/2], even about 1/2.

    Args:
      p: f[...] probability of a right answer. K: group size, at least 2.
    """
    c = np.arange(K + 1)
    return _counts(p, K) @ np.sqrt(c * (K - c)) / K


def phi(p: np.ndarray, K: int) -> np.ndarray:
    """P(vote of K right) - P(vote wrong), f64[...], odd about 1/2 (our definition).

    A tie goes to the answer seen first, so it counts 0; hence phi of 2m equals phi of 2m - 1.
    """
    return _counts(p, K) @ np.sign(2.0 * np.arange(K + 1) - K)


def q(p: np.ndarray, K: int, eta: float = 1.0) -> np.ndarray:
    """dp/dt = eta p (1 - p) g under right labels, -q under wrong ones (our derivation). f64[...]."""
    p = np.asarray(p, float)
    return eta * p * (1 - p) * g(p, K)


def self_speed(p: np.ndarray, K: int) -> np.ndarray:
    """Speed of a policy whose own majority is its label: E[sgn(2C - K) sqrt(C(K - C))] / K (our derivation). f64[...].

    It is not g · phi: the vote and the samples are the same ones.
    """
    c = np.arange(K + 1)
    return _counts(p, K) @ (np.sign(2.0 * c - K) * np.sqrt(c * (K - c))) / K


def self_drift(p: np.ndarray, K: int, eta: float = 1.0) -> np.ndarray:
    """dp/dt of a policy whose own majority is its label, as in TTRL; odd about 1/2 (our derivation). f64[...]."""
    p = np.asarray(p, float)
    return eta * p * (1 - p) * self_speed(p, K)


def sample_std_factor(K: int) -> float:
    """What all speeds are multiplied by if advantages divide by the sample standard deviation: sqrt((K - 1)/K)."""
    return float(np.sqrt((K - 1) / K))


# ---- Co-RL: each policy learns from the vote of the one before it in a ring


def peer_speed(p: np.ndarray, K: int) -> np.ndarray:
    """Speeds of N policies in a ring: g(p_i) phi(p_(i-1)), f64[..., N] from f[..., N] (our derivation; published idea:
    Co-RL). An exact product, as the peer's vote does not depend on the own samples."""
    return g(p, K) * phi(np.roll(p, 1, axis=-1), K)


def co_rl(p: np.ndarray, K: int, eta: float = 1.0) -> np.ndarray:
    """The vector field dp_i/dt = q(p_i) phi(p_(i-1)) of N policies in a ring, f64[..., N] from f[..., N].

    With two policies it is (q(p_A) phi(p_B), q(p_B) phi(p_A)), and p_A + p_B = 1 parts the starts that end at (1, 1)
    from those that end at (0, 0).
    """
    p = np.asarray(p, float)
    return eta * p * (1 - p) * peer_speed(p, K)


def F(p: np.ndarray, K: int) -> np.ndarray:
    """Integral of phi/q from 1/2 to p (eta = 1); F(p_A) - F(p_B) does not change under `co_rl` (our derivation).

    Args:
      p: f[...] in (0, 1).

    Returns:
      f64[...], even about 1/2.
    """
    z = logit(np.asarray(p, float))
    # In z the factor p (1 - p) of q goes away.
    ratio = lambda s: z * phi(expit(s * z), K) / g(expit(s * z), K)
    return quad_vec(ratio, 0, 1, epsabs=1e-11, epsrel=1e-11)[0]


def trajectory(speed: Speed, start: Sequence[float], times: Sequence[float]) -> np.ndarray:
    """Where policies are at given times.

    Args:
      speed: f64[N] probabilities -> f64[N] speeds, e.g. `lambda p: peer_speed(p, K)`.
      start: f[N] probabilities at time 0, in (0, 1). times: f[T] ascending, units of 1/eta.

    Returns:
      f64[T, N] probabilities.

    Raises:
      ValueError: a start is not strictly between 0 and 1.
    """
    times = np.asarray(times, float)
    return expit(_solve(speed, start, max(times[-1], 1e-12), t_eval=times).y.T)


def time_to_all(speed: Speed, start: Sequence[float], level: float = 0.99, horizon: float = 1e5) -> float:
    """First time, in units of 1/eta, at which all policies are above a level; inf if not before the horizon.

    Arguments and errors as in `trajectory`.
    """
    above = lambda t, z: expit(z.min()) - level
    above.terminal, above.direction = True, 1
    if np.min(start) > level:
        return 0.0
    (found,) = _solve(speed, start, horizon, events=above).t_events
    return float(found[0]) if len(found) else np.inf


def complementary(
    peer: bool, K: int = 8, eta: float = 0.2, steps: int = 300, prompts: int = 2000,
    parts: Sequence[Sequence[float]] = HALVES, seed: int = 0,
) -> np.ndarray:  # fmt: skip
    """A stochastic run of N tabular policies with a parameter a prompt: every step each draws a group of K on every
    prompt and moves by its mean gradient towards the majority of the policy before it, or its own (our definition).

    Args:
      peer: labels by the policy before in the ring (Co-RL); False: by itself.
      prompts: of each part. parts: f[parts][N] initial probabilities of each policy.

    Returns:
      f64[steps + 1, N] mean probability of a right answer over all prompts.
    """
    rng = np.random.default_rng(seed)
    z = logit(np.repeat(np.asarray(parts, float), prompts, axis=0))
    means = [expit(z).mean(0)]
    for _ in range(steps):
        right = rng.binomial(K, expit(z))
        vote = np.sign(2 * right - K)
        vote = np.where(vote == 0, rng.choice((-1, 1), vote.shape), vote)  # which answer was seen first is chance
        if peer:
            vote = np.roll(vote, 1, axis=-1)
        z = z + eta * vote * np.sqrt(right * (K - right)) / K
        means.append(expit(z).mean(0))
    return np.array(means)


# ---- Rescue: a policy that hardly ever succeeds, and a peer that does


def p_rescue(p: np.ndarray, p_peer: np.ndarray, K: int) -> np.ndarray:
    """P(no own success and at least one of the peer's) in groups of K: (1-p)^K [1 - (1-p_peer)^K]. f64[...]."""
    return (1 - np.asarray(p, float)) ** K * _some(p_peer, K)


def sgt_speed(p: np.ndarray, p_peer: np.ndarray, K: int, lam: float) -> np.ndarray:
    """Speed under right labels and SGT's imitation of a peer's success: g + lam (1 - p) P(rescue) (our derivation).

    Args:
      lam: weight of the imitation; 0 is plain GRPO.
    """
    return g(p, K) + lam * (1 - np.asarray(p, float)) * p_rescue(p, p_peer, K)


def time_to_half(speed: Speed, p0: np.ndarray) -> np.ndarray:
    """Time, in units of 1/eta, from p0 to p = 1/2 of policies that move by themselves: the integral of dz / speed.

    Args:
      speed: f64[...] probabilities -> f64[...] speeds above 0, e.g. `lambda p: sgt_speed(p, p_peer, K, lam)`.
      p0: f[...] in (0, 1/2].
    """
    z = logit(np.asarray(p0, float))
    return quad_vec(lambda s: -z / speed(expit(s * z)), 0, 1, epsabs=0, epsrel=1e-10, limit=10_000)[0]


def rescue_law(p0: np.ndarray, p_peer: np.ndarray, K: int, lam: float) -> np.ndarray:
    """Time to one half for small p0, but for a constant (our derivation): ln(1 + l / (sqrt(K-1) p0)) / l with
    l = lam [1 - (1-p_peer)^K]. It grows as log(1/p0); without imitation it is 1 / (sqrt(K-1) p0). f64[...]."""
    alone = 1 / (np.sqrt(K - 1) * np.asarray(p0, float))
    weight = lam * _some(p_peer, K)
    return np.log1p(weight * alone) / weight if lam else alone


# ---- PRP: one pool of own and peer samples


def prp_speed(p: np.ndarray, p_peer: np.ndarray, K: int) -> np.ndarray:
    """Speed if the 2K samples of both are one group and count as own: E[sqrt(C(2K-C))]/(2K), C = C_A + C_B (our
    derivation; published idea). f64[...]. It does not switch off where the peer is worse."""
    own, peer = _pool(K)
    right = own + peer
    return (_pairs(p, p_peer, K) * np.sqrt(right * (2 * K - right))).sum((-2, -1)) / (2 * K)


def prp_weighted_speed(p: np.ndarray, p_peer: np.ndarray, K: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of the speed if peer samples carry exact density ratios, p/p_peer for a right answer
    and (1-p)/(1-p_peer) for a wrong one, unclipped (our derivation). f64[...] each."""
    p, p_peer = (x[..., None, None] for x in np.broadcast_arrays(np.asarray(p, float), np.asarray(p_peer, float)))
    own, peer = _pool(K)
    right = own + peer
    weight_right = own + peer * p / p_peer
    weight_wrong = (K - own) + (K - peer) * (1 - p) / (1 - p_peer)
    some = np.maximum(right, 1), np.maximum(2 * K - right, 1)  # a group of one kind has advantage 0
    up = weight_right * np.sqrt((2 * K - right) / some[0]) * (1 - p)
    down = weight_wrong * np.sqrt(right / some[1]) * p
    speed = np.where((right == 0) | (right == 2 * K), 0.0, up + down) / (2 * K)
    share = _pairs(p[..., 0, 0], p_peer[..., 0, 0], K)
    mean = (share * speed).sum((-2, -1))
    return mean, np.sqrt((share * (speed - mean[..., None, None]) ** 2).sum((-2, -1)))


def prp_second_moment(p: np.ndarray, p_peer: np.ndarray) -> np.ndarray:
    """E[rho²] of exact density ratios over the peer's answers: p²/p_peer + (1-p)²/(1-p_peer) = 1 + chi². f64[...]; it
    multiplies over tokens."""
    p, p_peer = np.asarray(p, float), np.asarray(p_peer, float)
    return p**2 / p_peer + (1 - p) ** 2 / (1 - p_peer)


# ---- The command


def collect(K: int, runs: Mapping[str, Run]) -> dict[str, Any]:
    """The numbers of theory.json.

    Args:
      K: samples a group. runs: by name.

    Raises:
      ConfigError: a run is damaged, or without two trained policies or evaluations; the message is one line.
    """
    real = {}
    for name, run in runs.items():
        try:
            real[name] = of_run(run)
        except (KeyError, TypeError) as error:
            why = f"{type(error).__name__}: {error}"
            raise ConfigError(f"--run={run.folder}: is damaged ({why}); a finished run is needed") from error
    starts = np.array(RESCUE_STARTS)
    laws = {"GRPO": 0.0, **{f"SGT {lam:g}": lam for lam in LAMBDAS}}
    times = {n: time_to_half(lambda p, lam=lam: sgt_speed(p, PEER, K, lam), starts) for n, lam in laws.items()}
    together = {"co-rl": complementary(True, K), "self-reward": complementary(False, K)}
    return {
        "schema": 1,
        "K": K,
        "sample_std_factor": sample_std_factor(K),
        "time_to_99": time_to_all(functools.partial(peer_speed, K=K), HALVES[0]),
        "rescue": {
            "p0": list(RESCUE_STARTS),
            "p_peer": PEER,
            "time_to_half": {n: t.tolist() for n, t in times.items()},
            "law": {n: rescue_law(starts, PEER, K, lam).tolist() for n, lam in laws.items()},
        },
        "complementary": {n: {"start": m[0].tolist(), "end": m[-1].tolist()} for n, m in together.items()},
        "runs": real,
    }


def read_command_line(argv: Sequence[str]) -> tuple[int, Path, dict[str, Run]]:
    """Group size, what the names of the files begin with, and runs by name.

    Raises:
      ConfigError: a flag, a folder or the place to write to is wrong; the message is one line.
    """
    values = flags.FlagValues()
    flags.DEFINE_integer("K", 8, "samples a group", lower_bound=2, upper_bound=MOST, flag_values=values)
    flags.DEFINE_string("out", "theory", "what the names of the files begin with", flag_values=values)
    flags.DEFINE_multi_string("run", [], "folder of a finished run; may be repeated", flag_values=values)
    try:
        rest = values(list(argv))
    except flags.Error as error:
        raise ConfigError(" ".join(str(error).split())) from error
    if len(rest) > 1:
        raise ConfigError(f"{rest[1]!r}: not a flag; allowed are --K, --out, and --run once a folder")
    out = Path(values["out"].value).expanduser()
    if not out.name or not out.parent.is_dir() or not os.access(out.parent, os.W_OK):
        raise ConfigError(f"out={values['out'].value!r}: must begin with a folder that can be written to")
    folders = values["run"].value
    return values["K"].value, out, open_runs(folders) if folders else {}


def main(argv: Sequence[str]) -> None:
    """Command line."""
    from mutualrl.analysis import theory_plots  # it draws what is above

    try:
        K, out, runs = read_command_line(argv)
        found = collect(K, runs)
    except ConfigError as error:
        sys.exit(str(error))
    files = [Path(f"{out}.{ending}") for ending in ("json", "html")]
    replace_text(files[0], json.dumps(found, indent=1, allow_nan=False) + "\n")
    replace_text(files[1], theory_plots.page(found))
    theory_plots.show(found)
    print(f"{files[1]}: with plots. {files[0]}: all numbers.")


def _counts(p: np.ndarray, K: int) -> np.ndarray:
    """f64[..., K + 1] binomial probabilities of each count of right samples."""
    if K < 2:
        raise ValueError(f"K={K}: a group needs at least 2 samples")
    p, c = np.asarray(p, float)[..., None], np.arange(K + 1)
    return binom(K, c) * p**c * (1 - p) ** (K - c)


def _some(p: np.ndarray, K: int) -> np.ndarray:
    """P(at least one of K right)."""
    return 1 - (1 - np.asarray(p, float)) ** K


def _pool(K: int) -> tuple[np.ndarray, np.ndarray]:
    """Counts of right own samples f64[K + 1, 1] and right peer samples f64[1, K + 1]."""
    c = np.arange(K + 1.0)
    return c[:, None], c[None]


def _pairs(p: np.ndarray, p_peer: np.ndarray, K: int) -> np.ndarray:
    """f64[..., K + 1, K + 1] probabilities of each pair of counts, own and peer."""
    return _counts(p, K)[..., :, None] * _counts(p_peer, K)[..., None, :]


def _solve(speed: Speed, start: Sequence[float], end: float, **more):
    """Integrates in log-odds, where nothing has to be kept inside (0, 1)."""
    start = np.asarray(start, float)
    if not ((start > 0) & (start < 1)).all():
        raise ValueError(f"start={start.tolist()}: must be strictly between 0 and 1")
    return solve_ivp(
        lambda t, z: speed(expit(z)), (0, end), logit(start), method="DOP853", rtol=1e-10, atol=1e-12, **more
    )


if __name__ == "__main__":
    main(sys.argv)
