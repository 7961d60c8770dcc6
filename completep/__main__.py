"""`completep` and `python -m completep`."""

import os
import sys


def main() -> int:
    """Run one command. Ctrl-C ends it without a traceback, also while modules are being imported."""
    try:
        from completep.cli import main as command

        return command()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    code = main()
    if os.environ.get("WORLD_SIZE", "1") != "1":
        # Under torchrun: gloo's threads sometimes abort an interpreter that is shutting down, after all work is done.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
