"""See the package `mindformers`."""
