"""For tests, ours and those of other people's launchers, knobs and trackers: contract suites and fakes."""
