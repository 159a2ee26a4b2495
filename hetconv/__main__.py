"""``python -m hetconv`` is the ``hetconv`` command."""

if (
    __name__ == "__main__"
):  # and not when a rank's process, before anything else, imports what started it
    from .autotune.cli.main import main

    main()
