"""Programs whose functions are called with JSON arguments, as LiveCodeBench does, and those that try to pass anyhow."""

import json
import math

import pytest

from mutualrl.rewards import code, sandbox
from mutualrl.types import Problem

if sandbox.unavailable():
    pytest.skip(f"no isolation: {sandbox.unavailable()}", allow_module_level=True)

QUICK = code.Options(timeout_s=3.0)


def problem(name, *cases):
    """Cases are (arguments, result)."""
    lines = [("\n".join(map(json.dumps, args)), json.dumps(out)) for args, out in cases]
    return Problem("p", "q", extra={"func_name": name, "test_cases": [{"input": i, "output": o} for i, o in lines]})


TWO = problem("twoSum", (([2, 7, 11, 15], 9), [0, 1]), (([3, 3], 6), [0, 1]), (([3, 2, 4], 6), [1, 2]))
BODY = """def twoSum({self}nums: List[int], target: int) -> List[int]:
    seen = defaultdict(int)
    for i, n in enumerate(nums):
        if target - n in seen:
            return [seen[target - n], i]
        seen[n] = i
"""
METHOD = "class Solution:\n    " + BODY.format(self="self, ").replace("\n", "\n    ")
FUNCTION = BODY.format(self="")


def verdict(reply, given=TWO):
    return code.grade(f"```python\n{reply}\n```", given, QUICK)


def test_methods_and_functions_pass_with_what_the_runner_imports():
    for right in (METHOD, FUNCTION, "from __future__ import annotations\nimport json\n" + METHOD):
        assert verdict(right) == 1.0
    assert verdict(METHOD.replace("[seen[target - n], i]", "(seen[target - n], i)")) == 1.0  # a tuple stands for a list
    state = (
        "class Solution:\n    def __init__(self):\n        self.n = 1\n    def f(self, x):\n        return x + self.n"
    )
    assert verdict(state, problem("f", ((1,), 2), ((5,), 6))) == 1.0


@pytest.mark.parametrize(
    "wrong",
    [
        METHOD.replace("i]", "i + 1]"),
        METHOD.replace("[seen[target - n], i]", "{seen[target - n], i}"),
        METHOD.replace("[seen[target - n], i]", "[(seen[target - n], i)]"),
        METHOD.replace("[seen[target - n], i]", "str([seen[target - n], i])"),
        METHOD.replace("class Solution", "class Other"),
        METHOD.replace("twoSum", "two_sum"),
        "class Solution:\n    pass\n" + FUNCTION,
        FUNCTION.replace("nums: List[int], target", "nums, target, more"),
        "def twoSum(nums, target):\n    return [0, 1]",  # right for the first two
        "def twoSum(nums, target):\n    print([0, 1])",
        "twoSum = 1",
        "",
    ],
)
def test_wrong_programs_fail(wrong):
    assert verdict(wrong) == 0.0


def test_values_are_compared_as_json_has_them():
    kinds = [None, True, 7, 1 << 80, 0.1, "é\n", [], [[1, 2], []], {"a": [1]}]
    echo = "def f(x, y):\n    return [x, y]"
    assert verdict(echo, problem("f", *(((x, [x]), [x, [x]]) for x in kinds))) == 1.0
    for x in kinds:
        assert verdict("def f(x):\n    return [x]", problem("f", ((x,), x))) == 0.0
    assert verdict("def f(s):\n    return s", problem("f", (("a\\nb",), "a\\nb"))) == 1.0


def test_a_function_that_the_imports_bring_is_not_the_programs():
    assert verdict("x = 1", problem("gcd", ((4, 6), 2))) == 0.0
    assert verdict("def gcd(a, b):\n    return math.gcd(a, b)", problem("gcd", ((4, 6), 2))) == 1.0


def test_nan_without_cases():
    assert math.isnan(verdict(METHOD, Problem("p", "q", extra={"func_name": "f", "test_cases": []})))


WRONG = "\ndef twoSum(nums, target):\n    return [9]\n"
CHEATS = {
    "exit": "import os\nos._exit(0)",
    "exit in the call": "import os\ndef twoSum(a, b):\n    os._exit(0)",
    "exit by exception": "def twoSum(a, b):\n    raise SystemExit(0)",
    "exit while made": "import os\nclass Solution:\n    def __init__(self):\n        os._exit(0)",
    "always equal": "class E(list):\n    def __eq__(self, o): return True\n    def __ne__(self, o): return False\n"
    "def twoSum(a, b):\n    return E()",
    "equal object": "class E:\n    def __eq__(self, o): return True\n    def __ne__(self, o): return False\n"
    "def twoSum(a, b):\n    return E()",
    "equal tuple": "class E(tuple):\n    def __iter__(self): return iter(())\ndef twoSum(a, b):\n    return E((9,))",
    "marker": "import os\nfor fd in range(64):\n    try: os.write(fd, b'hello\\npass\\n')\n    except OSError: pass"
    + WRONG,
    "forged responses": "import os\ndef twoSum(a, b):\n    for fd in range(3, 64):\n"
    '        try: os.write(fd, b\'{"ok": "pass"}\\n\' * 9)\n        except OSError: pass',
    "json": "import json\njson.loads = lambda *a: [9]" + WRONG,
    "looks for outputs": "import gc, sys\ndef twoSum(a, b):\n    f = sys._getframe()\n    found = []\n    while f:\n"
    "        found.append(str(f.f_locals) + str(f.f_globals))\n        f = f.f_back\n"
    "    found += [str(o) for o in gc.get_objects() if isinstance(o, (list, dict, tuple, str))]\n"
    "    if any('test_cases' in x or 'outputs' in x and '[1, 2]' in x for x in found if 'found' not in x):\n"
    "        return [[0, 1], [1, 2]][a[0] == 3 and b == 6 and len(a) == 3]\n    return [9]",
    "metaclass": "class M(type):\n    def __call__(c): raise SystemExit(0)\nclass Solution(metaclass=M): pass",
    "any attribute": "class Solution:\n    def __getattr__(self, n):\n        return lambda *a: self",
    "loop": "def twoSum(a, b):\n    while True: pass",
    "digest": "print('0' * 64)",
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_cheats_fail_and_the_next_program_passes(cheat):
    compile(CHEATS[cheat], cheat, "exec")
    assert code.grade(f"```python\n{CHEATS[cheat]}\n```", TWO, code.Options(timeout_s=1.0)) == 0.0
    assert verdict(METHOD) == 1.0
