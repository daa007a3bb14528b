"""Write the results of a run as JSON Lines in the output format of OpenAI's Batch API. See `--help`."""

from __future__ import annotations

import sys

from specextend.cli.export import main
from specextend.terminal import guard_streams

if __name__ == "__main__":
    guard_streams()
    sys.exit(main(sys.argv[1:]))
