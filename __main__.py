"""`python -m updraft`: the same command line as `updraft`."""

from .cli.main import main

if __name__ == "__main__":
    main()
