import sys

from completep.cli import main

sys.exit(main())
