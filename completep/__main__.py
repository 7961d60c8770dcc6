import os
import sys

from completep.cli import main

code = main()
if os.environ.get("WORLD_SIZE", "1") != "1":
    # Under torchrun: gloo's threads sometimes abort an interpreter that is shutting down, after all work is done.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
sys.exit(code)
