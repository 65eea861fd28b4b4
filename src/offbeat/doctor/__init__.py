"""What makes workers wait though the method does not: found while a program runs, and named."""

from offbeat.doctor.doctor import Doctor
from offbeat.doctor.report import Diagnosis, diagnose
from offbeat.doctor.waits import Wait, Waits

__all__ = ["Diagnosis", "Doctor", "Wait", "Waits", "diagnose"]
