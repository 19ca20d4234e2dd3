"""Built-in tools and the tasks that need them: the parts of the env in `palestra.envs.text.tools`."""
