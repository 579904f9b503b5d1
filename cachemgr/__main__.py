"""`python -m cachemgr` and the `cachemgr` script."""

from cachemgr.cli import main

if __name__ == "__main__":
    main()
