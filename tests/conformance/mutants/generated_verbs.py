def mutants():
    return iter(())
