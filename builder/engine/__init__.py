"""Engine directories in the making: checks of a BuildConfig, the adapters that go along, and the files."""
