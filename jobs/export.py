"""Write the results of a run as JSON Lines in the output format of OpenAI's Batch API. See
`--help`.
"""

from specextend.cli.command import script
from specextend.cli.report import export

if __name__ == "__main__":
    script(export)
