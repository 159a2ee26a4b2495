"""``python -m hetconv`` is the ``hetconv`` command."""

from hetconv.autotune.cli import main

if __name__ == "__main__":
    main()
