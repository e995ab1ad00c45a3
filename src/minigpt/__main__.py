"""`python -m minigpt` is `minigpt`."""

import sys


def main() -> int:
    """Run the command line; whoever presses Ctrl-C while it is being imported reads one line too.

    Returns the exit status.
    """
    try:
        from minigpt import cli

        return cli.main()
    except KeyboardInterrupt:
        from minigpt.console import note

        note("interrupted")
        return 130


if __name__ == "__main__":
    sys.exit(main())
