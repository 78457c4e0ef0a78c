"""The tests of the suite, one package for each level and one module for each subject."""
