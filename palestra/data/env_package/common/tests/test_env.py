from my_env.env import MyEnv

from palestra.envs import load_env_class
from palestra.testing import check_env


def test_env_fulfils_the_contract():
    check_env(MyEnv)


def test_env_is_found_by_its_name():
    assert load_env_class("my_env") is MyEnv, "install the package: pip install -e ."
