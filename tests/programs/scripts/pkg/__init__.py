"""A project that is a package: `python -m pkg.train`."""
