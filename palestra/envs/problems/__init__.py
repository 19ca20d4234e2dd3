"""Problems for the math and code envs (generated, from files, of reasoning-gym) and the grading of answers."""
