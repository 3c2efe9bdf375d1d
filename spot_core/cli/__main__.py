"""`python -m spot_core.cli`: the same as `spot`, for an environment whose scripts are not on PATH."""

from spot_core.cli import main

if __name__ == "__main__":
    main()
