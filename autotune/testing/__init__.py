"""Public fakes and contract suites, for our tests and for those who write a launcher, a sampler or a tracker."""
