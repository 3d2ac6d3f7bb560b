from recipes.holderpo.holderpo import METHOD
from verl_ext.registry import register_method

register_method(METHOD)
