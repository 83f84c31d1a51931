"""The workshop: nine lessons that run on a laptop, each with an exercise that checks itself.

    python -m lessons                     the lessons, which are done, what is next
    python -m lessons 3                   lesson 3: its words, and what its code prints and draws
    python -m lessons 3 --short           the same with fewer and smaller runs: about half a minute
    python -m lessons 3 --answers         the answers to its questions
    python -m lessons check 3             checks your answer, lessons/mine/3_many_devices.py
    python -m lessons check 3 --file=my.py    checks another file

A lesson is also a file to open in an editor: lessons/3_many_devices.py runs cell by cell in VS
Code, PyCharm and Spyder, and in Jupyter with jupytext. The first check puts a stub in lessons/mine/
for you to complete; git ignores that folder. Solutions are in lessons/solutions/.

Exit status of a check: 0 if every part is right, 1 if not.
"""

import program
from lessons import workshop

if __name__ == "__main__":
    program.run(workshop.main)
