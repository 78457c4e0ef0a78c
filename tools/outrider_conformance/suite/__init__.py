"""The tests, a module for each subject; ``test_lN_…`` belongs to level N."""
