"""The tools that ship and the tasks that need them: what the env in `palestra.envs.text.tools` is made of."""
