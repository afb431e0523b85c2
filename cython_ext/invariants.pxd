from cython_ext.entities cimport Task
from cython_ext.transitions cimport SchedulerMachine

cpdef list check(SchedulerMachine machine)
cpdef list check_task(SchedulerMachine machine, Task task)
