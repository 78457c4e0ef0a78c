"""The tests of the suite, one module per subject. Modules ``test_lN_…`` belong to level N."""
