"""The state machine of `tests.cache.test_machine`: its model, its world, its rules, and a recount of the books."""
