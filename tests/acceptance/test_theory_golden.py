"""The golden numbers of the methods specification for the theory simulators, through their public functions: ids
theory.*."""

import json
import pathlib

import numpy as np
import pytest

from mutualrl.analysis import theory

PATH = pathlib.Path(__file__).parents[3] / "shared" / "design" / "methods_golden.json"
if not PATH.is_file():
    pytest.skip(f"no golden numbers at {PATH}", allow_module_level=True)
CASES = {c["id"]: c for c in json.loads(PATH.read_text())["cases"] if c["id"].startswith("theory.")}


@pytest.mark.parametrize("name", CASES)
def test_golden(name):
    """A case added to the file fails here until it is checked below."""
    case = CASES[name]
    relative = case.get("tolerance_kind") == "relative"
    how = {"rel": case["tolerance"], "abs": 0} if relative else {"abs": case["tolerance"], "rel": 0}
    CHECKS[name](case["inputs"], case["expected"], lambda x: pytest.approx(np.asarray(x, float), **how))


def test_every_case_of_the_file_is_checked():
    assert set(CHECKS) == set(CASES)


def one_group(x, expected, near):
    assert set(expected) == {"g", "phi", "q", "self_drift"}
    for function, values in expected.items():
        assert getattr(theory, function)(np.array(x["p"]), x["K"]) == near(values)


def std_convention(x, expected, near):
    assert [theory.sample_std_factor(K) for K in x["K"]] == near(expected["sample_std_factor"])


def endpoints(x, expected, near):
    T = x.get("T", 400)
    for start in x["starts"]:
        path = theory.trajectory(lambda p: theory.peer_speed(p, x["K"]), start, [0, T])
        assert path[-1] == near(expected["limit"][str(start)])


def invariant(x, expected, near):
    values = expected["values"]
    times = np.linspace(0, x["t_max"], len(values))
    f = theory.F(theory.trajectory(lambda p: theory.peer_speed(p, x["K"]), x["start"], times), x["K"])
    assert f[:, 0] - f[:, 1] == near(values)
    assert f[0, 0] - f[0, 1] == near(expected["F_difference"])


def t99(x, expected, near):
    found = [theory.time_to_all(lambda p, K=K: theory.peer_speed(p, K), x["start"], 0.99) for K in x["K"]]
    assert found == near(expected["time"])


def stochastic(x, expected, near):
    run = dict(K=x["K"], eta=x["eta"], steps=x["steps"], prompts=x["prompts_per_half"], parts=x["halves"])
    peer, alone = theory.complementary(True, **run), theory.complementary(False, **run)
    assert peer[0] == pytest.approx(np.full(2, expected["start"])) and (peer[-1] >= expected["corl_min"]).all()
    assert alone[-1] == pytest.approx(np.full(2, expected["self_reward"]), abs=expected["self_tol"])


def sgt_times(x, expected, near):
    weights = {"grpo": 0.0, "sgt_lam_0.1": 0.1, "sgt_lam_0.01": 0.01}
    for p0, times in expected.items():
        speeds = [lambda p, c=c: theory.sgt_speed(p, x["p_peer"], x["K"], weights[c]) for c in x["columns"]]
        assert [theory.time_to_half(s, float(p0)) for s in speeds] == near(times)


def sgt_asymptote(x, expected, near):
    K, peer, p0 = x["K"], x["p_peer"], np.array(x["p0"])
    law = theory.rescue_law(p0, peer, K, x["lam"])
    assert law == pytest.approx(np.array(expected["law"]), rel=1e-9)
    assert law[1] - law[0] == pytest.approx(expected["law_difference"], rel=1e-9)
    assert theory.rescue_law(1e-6, peer, K, 0.0) == pytest.approx(expected["grpo_law_1e_6"], rel=1e-9)
    assert x["lam"] * theory.p_rescue(0.0, peer, K) == pytest.approx(expected["lam_eff"], rel=1e-9)
    solved = theory.time_to_half(lambda p: theory.sgt_speed(p, peer, K, x["lam"]), p0)
    assert solved == near(expected["simulated"])
    assert solved[1] - solved[0] == near(expected["simulated_difference"])
    assert solved[1] - solved[0] == near(law[1] - law[0])


def p_rescue(x, expected, near):
    p, peer = np.array(x["pairs"]).T
    assert theory.p_rescue(p, peer, x["K"]) == near(expected["p_rescue"])


def prp_drift(x, expected, near):
    K, peer = x["K"], x["p_peer"]
    assert x["columns"] == ["grpo_K", "grpo_2K", "prp_a", "prp_b_mean", "prp_b_std"]
    p = np.array([float(k) for k in expected])
    found = [theory.g(p, K), theory.g(p, 2 * K), theory.prp_speed(p, peer, K), *theory.prp_weighted_speed(p, peer, K)]
    assert np.stack(found, 1) == near(list(expected.values()))


def prp_times(x, expected, near):
    K, peer = x["K"], x["p_peer"]
    assert x["columns"] == ["grpo_8", "grpo_16", "prp_a", "prp_b"]
    speeds = (
        lambda p: theory.g(p, 8),
        lambda p: theory.g(p, 16),
        lambda p: theory.prp_speed(p, peer, K),
        lambda p: theory.prp_weighted_speed(p, peer, K)[0],
    )
    p0 = np.array([float(k) for k in expected])
    assert np.stack([theory.time_to_half(s, p0) for s in speeds], 1) == near(list(expected.values()))


def second_moment(x, expected, near):
    assert theory.prp_second_moment(*np.array(x["pairs"]).T) == near(expected["E_rho2"])


def no_switch_off(x, expected, near):
    assert theory.prp_speed(x["pA"], x["pB"], x["K"]) == near(expected["prp_a"])
    assert theory.g(x["pA"], x["K"]) == near(expected["grpo"])


CHECKS = {
    **{f"theory.g_phi_q_self.K{K}": one_group for K in (3, 4, 8, 12)},
    "theory.std_convention": std_convention,
    "theory.corl.endpoints": endpoints,
    "theory.corl.invariant": invariant,
    "theory.corl.t99": t99,
    "theory.ring3.endpoints": endpoints,
    "theory.complementary.stochastic": stochastic,
    "theory.sgt.time_to_half": sgt_times,
    "theory.sgt.asymptote": sgt_asymptote,
    "theory.sgt.p_rescue": p_rescue,
    "theory.prp.drift": prp_drift,
    "theory.prp.time_to_half": prp_times,
    "theory.prp.second_moment": second_moment,
    "theory.prp.no_switch_off": no_switch_off,
}
