"""Contract suites and fakes that several folders of tests share."""
