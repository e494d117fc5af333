"""Runs the command line: `python -m halfbyte` is the same as `halfbyte`."""

from halfbyte.main import main

raise SystemExit(main())
