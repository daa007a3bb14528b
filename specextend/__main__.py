"""`python -m specextend`: the command where its script is not on the path."""

from specextend.cli.main import main

if __name__ == "__main__":
    main()
