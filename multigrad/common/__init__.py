"""What every other folder may import: errors, type sets, closures, versions and private names of Keras."""
