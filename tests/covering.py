"""Covering arrays: a few cases of a big product in which any two values of two axes still meet."""

import itertools

import pytest


def covering(*axes, strength=2):
    """Choose cases, a value of each axis, such that any values of any `strength` axes meet in one of them.

    Greedy, and the same for equal arguments: each case begins with a combination that no case has yet, and takes for
    every other axis the value that adds most new ones. With `strength` 1 each value occurs once at least.
    """
    sizes = [range(len(axis)) for axis in axes]
    missing = {
        tuple(zip(chosen, values, strict=True)): None
        for chosen in itertools.combinations(range(len(axes)), strength)
        for values in itertools.product(*(sizes[axis] for axis in chosen))
    }
    cases = []
    uses = {(axis, value): 0 for axis, values in enumerate(sizes) for value in values}
    while missing:
        case = dict(next(iter(missing)))
        for axis in sorted(set(range(len(axes))) - set(case), key=lambda axis: -len(axes[axis])):
            gains = [(_gain(case, (axis, value), missing, strength), -uses[axis, value]) for value in sizes[axis]]
            case[axis] = gains.index(max(gains))
        for pick in itertools.combinations(sorted(case.items()), strength):
            missing.pop(pick, None)
        for item in case.items():
            uses[item] += 1
        cases.append(tuple(axis[case[number]] for number, axis in enumerate(axes)))
    return cases


def each_once_then_slow(*axes):
    """Choose cases for `parametrize`: in every test run those with each value once, in the long one all pairs."""
    fast = covering(*axes, strength=1)
    slow = [case for case in covering(*axes) if case not in fast]
    return [*fast, *(pytest.param(*case, marks=pytest.mark.slow) for case in slow)]


def _gain(case, item, missing, strength):
    """Count the missing combinations of `item` with values that the case has already."""
    known = itertools.combinations(case.items(), strength - 1)
    return sum(tuple(sorted((*others, item))) in missing for others in known)
