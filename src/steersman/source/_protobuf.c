/*
 * The decoder of protobuf.py: messages to structs, by its tables.
 *
 * A field that cannot be decoded ends the message. The innermost one sets `fault` to where it
 * begins, and decode() raises the error with that place.
 *
 * The limited API serves CPython 3.11 and later with one file. Bounds are checked in read_varint()
 * and read_field(), nowhere else. Recursion is as deep as tables are nested, as a Decoder only
 * refers to those that were made before it.
 */

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define MOST_FIELDS 16 /* of a struct */
#define MOST_NUMBER 31 /* of a field */
#define LONGEST 256 /* bytes of a value in a memo; a longer one is hardly ever equal to another */
#define KNOWN 512 /* places in a memo */

/* Conversions, numbered as Kind in protobuf.py; the last four are of varints. */
enum kind { TEXT, TEXT_OR_NONE, BYTES, MESSAGE, ENTRIES, CALL, BOOL, INT32, INT32_OR_NONE, UINT64 };

/* A place in a memo: a value by its bytes. Of two that share a place the later one stays. */
struct known {
	PyObject *key; /* bytes; NULL: free */
	PyObject *value;
};

struct row {
	int used;
	enum kind kind;
	int many;
	Py_ssize_t index; /* of the struct's field */
	PyObject *with; /* MESSAGE: a Decoder, ENTRIES: (struct, keys), CALL: a function */
	struct known *memo; /* NULL: none */
};

typedef struct {
	PyObject_HEAD PyObject *type; /* the struct */
	PyObject *blank; /* a tuple: the values of missing fields */
	PyObject *error; /* the type of exceptions for malformed messages */
	Py_ssize_t size; /* of blank */
	struct row rows[MOST_NUMBER + 1];
} Decoder;

struct field {
	uint64_t tag;
	uint64_t number; /* of a varint */
	const uint8_t *data; /* of wire type 2 */
	Py_ssize_t length;
};

/* Return what follows a number; NULL if it is malformed. */
static const uint8_t *read_varint(const uint8_t *at, const uint8_t *end, uint64_t *number)
{
	uint64_t value = 0;
	int shift;

	for (shift = 0; at < end && shift < 70; shift += 7) {
		uint8_t byte = *at++;

		if (shift == 63 && (byte & 127) > 1)
			return NULL; /* above 64 bits */
		value |= (uint64_t)(byte & 127) << shift;
		if (byte < 128) {
			*number = value;
			return at;
		}
	}
	return NULL;
}

/* Return what follows a field; NULL if it is malformed. */
static const uint8_t *read_field(const uint8_t *at, const uint8_t *end, struct field *field)
{
	uint64_t length = 0;

	at = read_varint(at, end, &field->tag);
	if (at == NULL)
		return NULL;
	switch (field->tag & 7) {
	case 0:
		return read_varint(at, end, &field->number);
	case 1:
		length = 8;
		break;
	case 2:
		at = read_varint(at, end, &length);
		if (at == NULL)
			return NULL;
		break;
	case 5:
		length = 4;
		break;
	default:
		return NULL;
	}
	if (length > (uint64_t)(end - at))
		return NULL;
	field->data = at;
	field->length = (Py_ssize_t)length;
	return at + length;
}

/*
 * Values. Functions return a new reference, or NULL if it is malformed: without an exception, or
 * with one of Python's (a text that is not UTF-8).
 */

static PyObject *decode_message(Decoder *self, const uint8_t *at, const uint8_t *end,
				const uint8_t **fault);

static PyObject *decode_number(struct row *row, uint64_t number)
{
	int64_t value = (int64_t)number;

	switch (row->kind) {
	case BOOL:
		return PyBool_FromLong(number != 0);
	case UINT64:
		return PyLong_FromUnsignedLongLong(number);
	default:
		if (value < INT32_MIN || value > INT32_MAX)
			return NULL;
		if (value == 0 && row->kind == INT32_OR_NONE)
			return Py_NewRef(Py_None);
		return PyLong_FromLong((long)value);
	}
}

static PyObject *decode_bytes(struct row *row, const struct field *field, const uint8_t **fault)
{
	const char *data = (const char *)field->data;
	PyObject *raw, *value;

	switch (row->kind) {
	case TEXT_OR_NONE:
		if (field->length == 0)
			return Py_NewRef(Py_None);
		/* fall through */
	case TEXT:
		return PyUnicode_FromStringAndSize(data, field->length);
	case BYTES:
		return PyBytes_FromStringAndSize(data, field->length);
	case MESSAGE:
		return decode_message((Decoder *)row->with, field->data,
				      field->data + field->length, fault);
	default:
		raw = PyBytes_FromStringAndSize(data, field->length);
		if (raw == NULL)
			return NULL;
		value = PyObject_CallFunctionObjArgs(row->with, raw, NULL);
		Py_DECREF(raw);
		return value;
	}
}

/* Return the place of some bytes in a memo. */
static struct known *place(struct row *row, const struct field *field)
{
	const uint64_t odd = 0x9E3779B97F4A7C15;
	uint64_t hash = (uint64_t)field->length, word;
	const uint8_t *at = field->data;
	Py_ssize_t left = field->length;

	for (; left > 0; left -= 8, at += 8) {
		word = 0;
		memcpy(&word, at, left < 8 ? (size_t)left : 8);
		hash = (hash ^ word) * odd;
		hash ^= hash >> 32;
	}
	return &row->memo[(hash * odd) >> 32 & (KNOWN - 1)];
}

/* As decode_bytes(), for a row with a memo. */
static PyObject *decode_known(struct row *row, const struct field *field, const uint8_t **fault)
{
	struct known *known, old;
	PyObject *value, *key;

	if (field->length > LONGEST)
		return decode_bytes(row, field, fault);
	known = place(row, field);
	if (known->key != NULL && PyBytes_Size(known->key) == field->length &&
	    memcmp(PyBytes_AsString(known->key), field->data, (size_t)field->length) == 0)
		return Py_NewRef(known->value);
	value = decode_bytes(row, field, fault);
	if (value == NULL)
		return NULL;
	key = PyBytes_FromStringAndSize((const char *)field->data, field->length);
	if (key == NULL) {
		Py_DECREF(value);
		return NULL;
	}
	old = *known;
	known->key = key;
	known->value = Py_NewRef(value);
	Py_XDECREF(old.key);
	Py_XDECREF(old.value);
	return value;
}

/* Return the index of an entry's key among those that are read; -1: it is not. */
static Py_ssize_t known_key(PyObject *keys, const struct field *key)
{
	Py_ssize_t each;

	for (each = PyTuple_Size(keys) - 1; each >= 0; each--) {
		PyObject *known = PyTuple_GetItem(keys, each);

		if (PyBytes_Size(known) == key->length &&
		    memcmp(PyBytes_AsString(known), key->data, (size_t)key->length) == 0)
			break;
	}
	return each;
}

/* Put an entry of a map into the tuple of those that are read; return 0, or -1 for NULL. */
static int decode_entry(PyObject *keys, PyObject *values, const struct field *entry)
{
	const uint8_t *at = entry->data, *end = at + entry->length;
	struct field field, key = { 0 }, value = { .data = (const uint8_t *)"" };
	PyObject *text;
	Py_ssize_t index;

	while (at < end) {
		int first = at == entry->data && *at == 0x0A;

		at = read_field(at, end, &field);
		if (at == NULL)
			return -1;
		if (field.tag == (1 << 3 | 2)) {
			key = field;
			/* The rest of what nobody reads is not looked at. */
			if (first && known_key(keys, &key) < 0)
				return 0;
		} else if (field.tag == (2 << 3 | 2)) {
			value = field;
		} else if (field.tag >> 3 == 1 || field.tag >> 3 == 2) {
			return -1;
		}
	}
	index = known_key(keys, &key);
	if (index < 0)
		return 0;
	text = PyUnicode_FromStringAndSize((const char *)value.data, value.length);
	return text == NULL ? -1 : PyTuple_SetItem(values, index, text);
}

/* Add an entry to those of a field, or an item to a list; return 0, or -1 for NULL. */
static int add(struct row *row, PyObject **values, const struct field *field,
	       const uint8_t **fault)
{
	PyObject *item;
	int result;

	if (row->kind == ENTRIES) {
		PyObject *keys = PyTuple_GetItem(row->with, 1);

		if (*values == NULL) {
			Py_ssize_t each = PyTuple_Size(keys);

			*values = PyTuple_New(each);
			if (*values == NULL)
				return -1;
			while (--each >= 0)
				PyTuple_SetItem(*values, each, Py_NewRef(Py_None));
		}
		return decode_entry(keys, *values, field);
	}
	if (*values == NULL && (*values = PyList_New(0)) == NULL)
		return -1;
	item = row->memo != NULL ? decode_known(row, field, fault) :
				   decode_bytes(row, field, fault);
	if (item == NULL)
		return -1;
	result = PyList_Append(*values, item);
	Py_DECREF(item);
	return result;
}

/* Replace the tuples of entries by their structs; return 0, or -1 for NULL. */
static int close_entries(Decoder *self, PyObject **values)
{
	int number;

	for (number = 0; number <= MOST_NUMBER; number++) {
		struct row *row = &self->rows[number];
		PyObject *entries = values[row->index];

		if (!row->used || row->kind != ENTRIES || entries == NULL)
			continue;
		values[row->index] = PyObject_Call(PyTuple_GetItem(row->with, 0), entries, NULL);
		Py_DECREF(entries);
		if (values[row->index] == NULL)
			return -1;
	}
	return 0;
}

static PyObject *decode_message(Decoder *self, const uint8_t *at, const uint8_t *end,
				const uint8_t **fault)
{
	const uint8_t *begin = at; /* of a field */
	PyObject *values[MOST_FIELDS] = { NULL }, *made = NULL, *given;
	Py_ssize_t each;

	while (at < end) {
		PyObject **value, *found;
		struct field field;
		struct row *row;

		begin = at;
		at = read_field(at, end, &field);
		if (at == NULL)
			goto failed;
		if (field.tag >> 3 > MOST_NUMBER || !self->rows[field.tag >> 3].used)
			continue;
		row = &self->rows[field.tag >> 3];
		value = &values[row->index];
		if ((field.tag & 7) != (row->kind < BOOL ? 2 : 0))
			goto failed;
		if (row->many) {
			if (add(row, value, &field, fault) < 0)
				goto failed;
			continue;
		}
		if (row->kind >= BOOL)
			found = decode_number(row, field.number);
		else if (row->memo != NULL)
			found = decode_known(row, &field, fault);
		else
			found = decode_bytes(row, &field, fault);
		Py_XDECREF(*value);
		*value = found;
		if (found == NULL)
			goto failed;
	}
	if (close_entries(self, values) < 0)
		goto failed;
	given = PyTuple_New(self->size);
	if (given == NULL)
		goto failed;
	for (each = 0; each < self->size; each++) {
		PyObject *value = values[each];

		values[each] = NULL;
		if (value == NULL)
			value = Py_NewRef(PyTuple_GetItem(self->blank, each));
		PyTuple_SetItem(given, each, value);
	}
	made = PyObject_Call(self->type, given, NULL);
	Py_DECREF(given);
failed:
	if (made == NULL && *fault == NULL)
		*fault = begin;
	for (each = 0; each < self->size; each++)
		Py_XDECREF(values[each]);
	return made;
}

static PyObject *decode(Decoder *self, PyObject *message)
{
	const uint8_t *begin, *fault = NULL;
	PyObject *found;
	Py_ssize_t size;
	char *data;

	if (PyBytes_AsStringAndSize(message, &data, &size) < 0)
		return NULL;
	begin = (const uint8_t *)data;
	found = decode_message(self, begin, begin + size, &fault);
	if (found != NULL)
		return found;
	/* Texts that are not UTF-8, and errors of functions in CALL, are ValueErrors. */
	if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_ValueError))
		return NULL;
	PyErr_Clear();
	return PyErr_Format(self->error, "malformed at byte %zd", (Py_ssize_t)(fault - begin));
}

/* Whether an object is what a row of ENTRIES has: (struct, keys). */
static int is_entries(PyObject *with)
{
	PyObject *keys;
	Py_ssize_t each;

	if (!PyTuple_Check(with) || PyTuple_Size(with) != 2)
		return 0;
	keys = PyTuple_GetItem(with, 1);
	if (!PyTuple_Check(keys))
		return 0;
	for (each = 0; each < PyTuple_Size(keys); each++) {
		if (!PyBytes_Check(PyTuple_GetItem(keys, each)))
			return 0;
	}
	return 1;
}

/* Take a row: (number, index, kind, with, many, memo); return 0, or -1 with an exception. */
static int set_row(Decoder *self, PyTypeObject *type, PyObject *given)
{
	int number, kind, many, memo;
	Py_ssize_t index;
	struct row *row;
	PyObject *with;

	if (!PyTuple_Check(given)) {
		PyErr_SetString(PyExc_TypeError, "a row that is not a tuple");
		return -1;
	}
	if (!PyArg_ParseTuple(given, "iniOpp", &number, &index, &kind, &with, &many, &memo))
		return -1;
	if (number < 1 || number > MOST_NUMBER || self->rows[number].used || index < 0 ||
	    index >= self->size || kind < TEXT || kind > UINT64 ||
	    ((many || memo) && kind >= BOOL)) {
		PyErr_SetString(PyExc_ValueError, "a row beyond the limits of the decoder");
		return -1;
	}
	if ((kind == MESSAGE && !PyObject_TypeCheck(with, type)) ||
	    (kind == ENTRIES && !is_entries(with))) {
		PyErr_SetString(PyExc_TypeError, "a row of another type");
		return -1;
	}
	row = &self->rows[number];
	if (memo) {
		row->memo = PyMem_Calloc(KNOWN, sizeof(struct known));
		if (row->memo == NULL) {
			PyErr_NoMemory();
			return -1;
		}
	}
	row->used = 1;
	row->kind = (enum kind)kind;
	row->many = many || kind == ENTRIES;
	row->index = index;
	row->with = Py_NewRef(with);
	return 0;
}

static PyObject *decoder_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(keywords))
{
	PyObject *struct_type, *blank, *rows, *error;
	Decoder *self;
	Py_ssize_t each;

	if (!PyArg_ParseTuple(args, "OO!O!O:Decoder", &struct_type, &PyTuple_Type, &blank,
			      &PyTuple_Type, &rows, &error))
		return NULL;
	if (PyTuple_Size(blank) > MOST_FIELDS) {
		PyErr_SetString(PyExc_ValueError, "a struct of too many fields");
		return NULL;
	}
	self = (Decoder *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
	if (self == NULL)
		return NULL;
	self->type = Py_NewRef(struct_type);
	self->blank = Py_NewRef(blank);
	self->size = PyTuple_Size(blank);
	self->error = Py_NewRef(error);
	for (each = 0; each < PyTuple_Size(rows); each++) {
		if (set_row(self, type, PyTuple_GetItem(rows, each)) < 0) {
			Py_DECREF(self);
			return NULL;
		}
	}
	return (PyObject *)self;
}

static int decoder_traverse(Decoder *self, visitproc visit, void *arg)
{
	int number;

	Py_VISIT(Py_TYPE((PyObject *)self));
	Py_VISIT(self->type);
	Py_VISIT(self->blank);
	Py_VISIT(self->error);
	for (number = 0; number <= MOST_NUMBER; number++) {
		struct row *row = &self->rows[number];
		int each;

		Py_VISIT(row->with);
		for (each = 0; row->memo != NULL && each < KNOWN; each++)
			Py_VISIT(row->memo[each].value);
	}
	return 0;
}

static int decoder_clear(Decoder *self)
{
	int number, each;

	Py_CLEAR(self->error);
	for (number = 0; number <= MOST_NUMBER; number++) {
		struct row *row = &self->rows[number];

		for (each = 0; row->memo != NULL && each < KNOWN; each++) {
			Py_CLEAR(row->memo[each].key);
			Py_CLEAR(row->memo[each].value);
		}
	}
	return 0;
}

static void decoder_dealloc(Decoder *self)
{
	PyTypeObject *type = Py_TYPE((PyObject *)self);
	int number;

	PyObject_GC_UnTrack(self);
	decoder_clear(self);
	Py_XDECREF(self->type);
	Py_XDECREF(self->blank);
	for (number = 0; number <= MOST_NUMBER; number++) {
		Py_XDECREF(self->rows[number].with);
		PyMem_Free(self->rows[number].memo);
	}
	((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
	Py_DECREF(type);
}

static PyMethodDef decoder_methods[] = {
	{ "decode", (PyCFunction)decode, METH_O, "Decode a message (bytes)." },
	{ NULL, NULL, 0, NULL },
};

static PyType_Slot decoder_slots[] = {
	{ Py_tp_doc, "Decoder(struct, blank, rows, error), see Table in protobuf.py." },
	{ Py_tp_new, decoder_new },
	{ Py_tp_traverse, decoder_traverse },
	{ Py_tp_clear, decoder_clear },
	{ Py_tp_dealloc, decoder_dealloc },
	{ Py_tp_methods, decoder_methods },
	{ 0, NULL },
};

static PyType_Spec decoder_spec = {
	.name = "steersman.source._protobuf.Decoder",
	.basicsize = sizeof(Decoder),
	.flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
	.slots = decoder_slots,
};

static int module_exec(PyObject *module)
{
	PyObject *type = PyType_FromModuleAndSpec(module, &decoder_spec, NULL);
	int result;

	if (type == NULL)
		return -1;
	result = PyModule_AddType(module, (PyTypeObject *)type);
	Py_DECREF(type);
	return result;
}

static PyModuleDef_Slot module_slots[] = {
	{ Py_mod_exec, module_exec },
	{ 0, NULL },
};

static struct PyModuleDef module = {
	PyModuleDef_HEAD_INIT,
	.m_name = "_protobuf",
	.m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__protobuf(void)
{
	return PyModuleDef_Init(&module);
}
