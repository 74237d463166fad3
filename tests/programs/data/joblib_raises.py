# needs: joblib, psutil
from joblib import Parallel, delayed


def work(number):
    if number == 5:
        raise ValueError("bad")
    return number


try:
    Parallel(n_jobs=2)(delayed(work)(number) for number in range(10))
except ValueError as error:
    print("caught", error)
