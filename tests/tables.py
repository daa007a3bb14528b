"""Cases of a test as a table: what somebody writes, an arrow, and what is said to it."""

import re


def cases(table):
    """Return both sides of each arrow, for `parametrize`; an arrow may begin a line."""
    lines = re.sub(r"\n\s*-> ", " -> ", table.strip()).splitlines()
    return [tuple(side.strip() for side in line.split(" -> ")) for line in lines]
