"""Measure all variants of a benchmark on the same documents, or show the tables of a result.

    python jobs/bench.py benchmarks/compare.yaml --json out/compare.json
    python jobs/bench.py benchmarks/results/compare-smollm2-epyc.json --draw out/compare.svg

Exit code 2: an option, the configuration, the documents or a model is unusable; 75: interrupted.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # benchmarks/ is not installed

from benchmarks.command import main
from specextend.terminal import guard_streams

if __name__ == "__main__":
    guard_streams()
    sys.exit(main(description=__doc__))
