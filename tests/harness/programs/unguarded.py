"""Runs workers.py without a main guard: a worker that imports this module would train, too."""

import workers

workers.main()
