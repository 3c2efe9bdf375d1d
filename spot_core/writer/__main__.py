"""`python -m spot_core.writer FD PARENT_PID PDEATHSIG`: started by `spot_core.writer.process`, never by hand."""

from __future__ import annotations

import sys

from spot_core.writer.serve import main

if __name__ == "__main__":
    main(sys.argv[1:])
