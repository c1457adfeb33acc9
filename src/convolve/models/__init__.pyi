from convolve.api.models import ModelInfo as ModelInfo
from convolve.api.models import create as create
from convolve.api.models import describe as describe
from convolve.api.models import list as list
from convolve.models.adopt import Adopted as Adopted
from convolve.models.adopt import adopt as adopt
from convolve.models.registration import register as register
