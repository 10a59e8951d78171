"""Laws of the theory: symmetries, what is conserved, what Monte Carlo says; and the command on made-up runs."""

import json
import re

import numpy as np
import pytest

from mutualrl.analysis import theory, theory_runs

P = np.array([0.02, 0.1, 0.3, 0.45, 0.5, 0.6, 0.77, 0.99])
SIZES = (2, 3, 4, 8, 13)
near = lambda x, tolerance=1e-12: pytest.approx(np.asarray(x, float), abs=tolerance, rel=0)


# ---- One group


@pytest.mark.parametrize("K", SIZES)
def test_right_labels_are_even_and_votes_are_odd(K):
    for even in (theory.g, theory.q):
        assert even(1 - P, K) == near(even(P, K)) and (even(P, K) > 0).all()
    for odd in (theory.phi, theory.self_speed, theory.self_drift):
        assert odd(1 - P, K) == near(-odd(P, K)) and odd(0.5, K) == near(0)
        off = P[P != 0.5]
        if K > 2 or odd is theory.phi:  # a pair has no majority to learn from
            assert (np.sign(odd(off, K)) == np.sign(off - 0.5)).all()


@pytest.mark.parametrize("m", (1, 2, 4, 6))
def test_one_more_sample_of_an_even_vote_changes_nothing(m):
    odd = theory.phi(P, 2 * m - 1) if m > 1 else 2 * P - 1  # groups of one are refused
    assert theory.phi(P, 2 * m) == near(odd)
    assert (np.abs(theory.phi(P, 2 * m + 1)) >= np.abs(theory.phi(P, 2 * m)) - 1e-12).all()


def test_pairs_have_a_closed_form():
    """Two samples differ with probability 2p(1 - p), and then sqrt(C (K - C)) / K is 1/2; without a majority."""
    assert theory.g(P, 2) == near(P * (1 - P))
    assert theory.self_speed(P, 2) == near(0 * P)
    assert theory.q(P, 2, eta=3.0) == near(3 * (P * (1 - P)) ** 2)


@pytest.mark.parametrize("p", (0.1, 0.3, 0.5, 0.8))
def test_monte_carlo_of_advantages(p):
    """The mean of advantage times score of groups that are drawn, normalised as the trainer does."""
    K, rng = 8, np.random.default_rng(0)
    right = rng.random((200_000, K)) < p
    std = right.std(1, keepdims=True)
    adv = np.where(std > 0, (right - right.mean(1, keepdims=True)) / np.where(std > 0, std, 1), 0)
    score = right - p
    assert (adv * score).mean() == near(theory.g(p, K), 1e-3)
    vote = np.sign(right.sum(1) * 2 - K)
    assert vote.mean() == near(theory.phi(p, K), 6e-3)
    assert ((adv * score).mean(1) * vote).mean() == near(theory.self_speed(p, K), 1e-3)


def test_sample_std_factor():
    x = np.array([1.0, 0, 0, 1, 0])
    assert theory.sample_std_factor(5) == near(x.std() / x.std(ddof=1))


def test_groups_of_one_are_refused():
    with pytest.raises(ValueError, match="K=1: a group needs at least 2"):
        theory.g(P, 1)


# ---- Co-RL


@pytest.mark.parametrize("K", SIZES)
def test_a_ring_of_two_is_the_field_of_two_policies(K):
    a, b = (x.ravel() for x in np.meshgrid(P, P))
    field = theory.co_rl(np.stack([a, b], -1), K, eta=0.7)
    assert field[:, 0] == near(theory.q(a, K, 0.7) * theory.phi(b, K))
    assert field[:, 1] == near(theory.q(b, K, 0.7) * theory.phi(a, K))


def test_a_ring_of_three_hears_the_one_before():
    p = np.array([0.9, 0.4, 0.6])
    moves = theory.co_rl(p, 8)
    assert moves == near([theory.q(p[i], 8) * theory.phi(p[i - 1], 8) for i in range(3)])
    assert (np.sign(moves) == [1, 1, -1]).all()


def test_the_saddle_of_three_has_one_growing_direction():
    h, middle = 1e-6, np.full(3, 0.5)
    jacobian = np.array([(theory.co_rl(middle + h * e, 8) - theory.co_rl(middle - h * e, 8)) / (2 * h)
                         for e in np.eye(3)]).T  # fmt: skip
    found = sorted(np.linalg.eigvals(jacobian), key=lambda x: (x.real, x.imag))
    assert np.real(found) == near([-0.253703, -0.253703, 0.507406], 1e-6)
    assert np.imag(found) == near([-0.439426, 0.439426, 0], 1e-6)


@pytest.mark.parametrize("K", (2, 4, 8))
def test_f_is_even_and_its_derivative_is_phi_over_q(K):
    assert theory.F(1 - P, K) == near(theory.F(P, K), 1e-8)
    assert theory.F(0.5, K) == 0
    p, h = np.array([0.2, 0.6, 0.9]), 1e-5
    slope = (theory.F(p + h, K) - theory.F(p - h, K)) / (2 * h)
    assert slope == pytest.approx(theory.phi(p, K) / theory.q(p, K), rel=1e-5)


@pytest.mark.parametrize("start", ((0.8, 0.35), (0.55, 0.4), (0.1, 0.2)))
def test_co_rl_conserves_the_difference_of_f(start):
    times = np.linspace(0, 15, 6)
    path = theory.trajectory(lambda p: theory.peer_speed(p, 8), start, times)
    assert path[0] == near(start) and np.abs(path[-1] - path[0]).max() > 0.05
    f = theory.F(path, 8)
    assert f[:, 0] - f[:, 1] == near(np.full(6, f[0, 0] - f[0, 1]), 1e-5)


def test_trajectories_follow_the_field():
    times = np.array([0, 0.01, 0.02])
    path = theory.trajectory(lambda p: theory.peer_speed(p, 8), (0.9, 0.29, 0.4), times)
    assert (path[2] - path[0]) / 0.02 == near(theory.co_rl(path[1], 8), 1e-5)


def test_the_sum_of_two_always_moves_to_its_limit():
    """What `agreement` relies on under peer votes, where one policy alone may move away at first."""
    a, b = np.meshgrid(np.linspace(0.01, 0.99, 99), np.linspace(0.01, 0.99, 99))
    moves = theory.co_rl(np.stack([a, b], -1), 8).sum(-1)
    off = np.abs(a + b - 1) > 1e-9
    assert (np.sign(moves[off]) == np.sign(a + b - 1)[off]).all()
    assert moves[~off] == near(np.zeros(99))  # the separatrix is kept
    assert theory.co_rl(np.array([0.7, 0.1]), 8)[1] > 0  # away from 0, which is its limit


def test_self_votes_amplify_what_there_is():
    path = theory.trajectory(lambda p: theory.self_speed(p, 8), (0.45, 0.55), [0, 400])
    assert path[-1] == near([0, 1], 1e-2)


def test_time_to_all():
    speed = lambda p: theory.peer_speed(p, 8)
    t = theory.time_to_all(speed, (0.9, 0.2))
    assert theory.trajectory(speed, (0.9, 0.2), [0, t])[-1].min() == near(0.99, 1e-7)
    assert theory.time_to_all(speed, (0.7, 0.2)) == np.inf
    assert theory.time_to_all(speed, (0.995, 0.999)) == 0
    with pytest.raises(ValueError, match="strictly between 0 and 1"):
        theory.time_to_all(speed, (0.9, 0.0))


def test_complementary_expertise_by_steps():
    run = dict(prompts=200, steps=100, seed=3)
    peer, alone = theory.complementary(True, **run), theory.complementary(False, **run)
    assert peer.shape == (101, 2) and peer[0] == near([0.55, 0.55])
    assert (peer[-1] > 0.9).all() and (np.abs(alone[-1] - 0.5) < 0.05).all()
    assert (theory.complementary(True, **run) == peer).all()
    # The mean step of many copies of one prompt is the drift, in log-odds.
    step = theory.complementary(True, eta=1e-3, steps=1, prompts=100_000, parts=[(0.8, 0.4)])
    assert (step[1] - step[0]) / 1e-3 == near(theory.co_rl(np.array([0.8, 0.4]), 8), 2e-3)


# ---- Rescue and pooling


def test_rescue_by_counting():
    rng = np.random.default_rng(1)
    own, peer = rng.binomial(8, 0.1, 200_000), rng.binomial(8, 0.05, 200_000)
    assert ((own == 0) & (peer > 0)).mean() == near(theory.p_rescue(0.1, 0.05, 8), 4e-3)
    assert theory.p_rescue(P, 0.0, 8) == near(0 * P)


def test_sgt_without_imitation_or_peer_is_grpo():
    assert theory.sgt_speed(P, 0.5, 8, 0.0) == near(theory.g(P, 8))
    assert theory.sgt_speed(P, 0.0, 8, 0.3) == near(theory.g(P, 8))
    low = P[P < 0.5]
    assert (theory.sgt_speed(low, 0.5, 8, 0.1) > theory.g(low, 8)).all()


def test_time_to_half_agrees_with_the_trajectory():
    speed = lambda p: theory.sgt_speed(p, 0.5, 8, 0.1)
    t = theory.time_to_half(speed, np.array([1e-3, 0.1, 0.5]))
    assert t.shape == (3,) and t[2] == 0
    for start, time in zip((1e-3, 0.1), t):
        assert theory.trajectory(speed, [start], [0, time])[-1] == near([0.5], 1e-6)


def test_the_law_goes_over_into_that_of_grpo():
    p0 = np.array([1e-3, 1e-5])
    assert theory.rescue_law(p0, 0.5, 8, 0.0) == pytest.approx(1 / (np.sqrt(7) * p0))
    assert theory.rescue_law(p0, 0.5, 8, 1e-9) == pytest.approx(1 / (np.sqrt(7) * p0), rel=1e-4)


def test_prp_of_an_equal_peer_is_a_group_twice_as_large():
    twice = theory.g(P, 16)
    assert theory.prp_speed(P, P, 8) == near(twice)
    assert theory.prp_weighted_speed(P, P, 8)[0] == near(twice)
    assert theory.prp_second_moment(P, P) == near(np.ones_like(P))


def test_prp_speeds_by_drawing():
    """Every term as the trainer has it: advantage in the pool, ratio of the text, score of the learner."""
    rng, a, b, K = np.random.default_rng(2), 0.2, 0.6, 4
    right = rng.random((200_000, 2 * K)) < np.repeat([a, b], K)
    std = right.std(1, keepdims=True)
    adv = np.where(std > 0, (right - right.mean(1, keepdims=True)) / np.where(std > 0, std, 1), 0)
    ratio = np.where(right, a / b, (1 - a) / (1 - b))
    weighted = (np.where(np.arange(2 * K) < K, 1, ratio) * adv * (right - a)).mean(1)
    mean, std = theory.prp_weighted_speed(a, b, K)
    assert (adv * (right - a)).mean() == near(theory.prp_speed(a, b, K), 1e-3)
    assert weighted.mean() == near(mean, 1e-3) and weighted.std() == near(std, 1e-3)
    assert (ratio[:, K:] ** 2).mean() == near(theory.prp_second_moment(a, b), 1e-2)


# ---- Next to a real run


def test_limits():
    assert theory_runs.limits((0.9, 0.2)) == {"right labels": [1, 1], "peer votes": [1, 1], "self votes": [1, 0]}
    assert theory_runs.limits((0.3, 0.6))["peer votes"] == [0, 0]
    unsure = theory_runs.limits((0.55, 0.5), error=0.05)
    assert unsure["peer votes"] == [None, None] and unsure["self votes"] == [None, None]


def test_agreement():
    each, both = "self votes", "peer votes"
    assert theory_runs.agreement(each, (0.6, 0.3), (0.8, 0.1), (1.0, 0.0), 0.01) is True
    assert theory_runs.agreement(each, (0.6, 0.3), (0.8, 0.5), (1.0, 0.0), 0.01) is False
    assert theory_runs.agreement(each, (0.6, 0.3), (0.8, 0.5), (1.0, 0.0), 0.1) is None  # not more than chance
    assert theory_runs.agreement(each, (0.6, 0.99), (0.8, 0.97), (1.0, 1.0), 0.001) is True  # at its limit all the time
    assert theory_runs.agreement(each, (0.6, 0.5), (0.8, 0.9), (1.0, None), 0.01) is None
    assert theory_runs.agreement(both, (0.85, 0.05), (0.5, 0.2), (0.0, 0.0), 0.01) is True
    assert theory_runs.agreement(both, (0.85, 0.05), (0.95, 0.2), (0.0, 0.0), 0.01) is False


def write_run(folder, label="peer_vote", frozen=False):
    """Three kinds of 20 problems, 10 samples each: one goes up, one down, one starts at the separatrix."""
    folder.mkdir(parents=True)
    path = {
        "up": ((9, 3), (9, 6), (10, 9)),
        "down": ((8, 1), (6, 2), (3, 1)),
        "edge": ((6, 4), (6, 4), (9, 8)),
    }  # of 10 samples, by kind and evaluation
    steps = {
        str(step): {p: [path[k][i][j] for k in path for _ in range(20)] + [-1] for j, p in enumerate(("llama", "qwen"))}
        for i, step in enumerate((0, 5, 10))
    }
    policies = {"llama": {"frozen": False}, "qwen": {"frozen": frozen}}
    config = {"steps": 10, "label": {"name": label}, "transfer": {"name": "none"}, "policies": policies}
    held_out = {"problems": [str(i) for i in range(61)], "kinds": [k for k in path for _ in range(20)] + ["none"]}
    held_out |= {"samples": 10, "steps": dict(reversed(steps.items()))}
    files = {"summary": {"config": config, "policies": {}}, "config": config, "held_out": held_out}
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    (folder / "metrics.jsonl").write_text('{"step": 1, "llama/success/mean": 0.5}\n')
    return folder


def test_the_command_writes_its_files(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "160")
    runs = [write_run(tmp_path / "a<b" / name, label) for name, label in (("peer", "peer_vote"), ("odd", "entropy"))]
    theory.main(["theory", "--K=4", f"--out={tmp_path / 'made'}", *(f"--run={r}" for r in runs)])
    found = json.loads((tmp_path / "made.json").read_text())
    assert found["K"] == 4 and found["time_to_99"] == near(68.2765, 1e-3)
    assert list(found["runs"]) == ["peer", "odd"]
    peer = found["runs"]["peer"]
    assert (peer["policies"], peer["law"], peer["steps"]) == (["llama", "qwen"], "peer votes", [0, 5, 10])
    assert found["runs"]["odd"]["law"] == ""
    kinds = peer["kinds"]
    assert list(kinds) == ["down", "edge", "up"]  # the problem that nobody could judge is left out
    assert kinds["up"]["path"] == [near(x) for x in ([0.9, 0.3], [0.9, 0.6], [1.0, 0.9])]
    assert {k: x["limits"]["peer votes"] for k, x in kinds.items()} == {
        "up": [1, 1], "down": [0, 0], "edge": [None, None]
    }  # fmt: skip
    assert {k: x["agrees"]["peer votes"] for k, x in kinds.items()} == {"up": True, "down": True, "edge": None}
    assert {k: x["agrees"]["self votes"] for k, x in kinds.items()} == {"up": False, "down": False, "edge": False}

    page = (tmp_path / "made.html").read_text()
    assert page.count("<svg") == 3 and "<h3>peer</h3>" in page and "<td>up</td>" in page
    assert not re.search(r"(src|href)=[\"']?(http|/)", page)  # nothing is fetched
    out = capsys.readouterr().out
    assert "peer votes *" in out and "0, 0: yes" in out and "?, ?: open" in out and str(tmp_path / "made.html") in out


def test_the_command_without_runs(tmp_path, capsys):
    theory.main(["theory", f"--out={tmp_path / 'theory'}"])
    found = json.loads((tmp_path / "theory.json").read_text())
    assert found["runs"] == {} and found["K"] == 8
    assert found["rescue"]["time_to_half"]["GRPO"][1] == pytest.approx(386.7, rel=1e-3)
    assert "p_A + p_B" in (tmp_path / "theory.html").read_text()
    assert "separatrix" not in capsys.readouterr().out


def test_wrong_command_lines_are_one_line(tmp_path):
    run = write_run(tmp_path / "frozen", frozen=True)
    (tmp_path / "empty").mkdir()
    damaged = write_run(tmp_path / "damaged") / "held_out.json"
    damaged.write_text(damaged.read_text().replace("qwen", "another"))
    wrong = {
        f"--run={tmp_path / 'nowhere'}": "nowhere.*finished run",
        f"--run={tmp_path / 'empty'}": "empty.*finished run",
        f"--run={run}": "^--run=[^ ]*frozen: has 1 trained policies and 3 evaluations",
        f"--run={damaged.parent}": "damaged: is damaged .*qwen",
        "--K=1": "K",
        "--K=many": "K",
        f"--out={tmp_path / 'no' / 'such'}": "out=.*can be written",
        "--colour=red": "colour",
        "here": "'here': not a flag",
    }
    for flag, why in wrong.items():
        with pytest.raises(SystemExit) as error:
            theory.main(["theory", f"--out={tmp_path / 'x'}", flag])
        assert "\n" not in error.value.code and re.search(why, error.value.code), error.value.code
    assert not list(tmp_path.glob("*.html")) and not list(tmp_path.glob("*.json"))
